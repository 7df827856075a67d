"""Streamed answers of an OpenAI endpoint, with the moment at which each token came.

For load tools: nothing is raised for what a server does wrong, the answer says it and keeps what came before.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

PATIENCE = 600.0
"""Seconds in which the next bytes of an answer must come."""
CONNECT = 30.0
HTTP_OK = 200
_SAID = 300  # characters of an error that are kept

now = time.perf_counter
"""The clock of all moments here."""


class Answer:
    """One answer, filled while it comes. Moments are of `now`; `tokens[i]` have come by `moments[i]`."""

    __slots__ = (
        "cached_tokens", "ended", "error", "finish_reason", "moments", "output_tokens", "prompt_tokens", "sent",
        "status", "tokens", "trace",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sent = self.ended = 0.0
        self.moments: list[float] = []
        self.tokens: list[int] = []
        self.status = 0  # of HTTP; 0: there was no response
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0  # as the server counts them
        self.finish_reason = ""
        self.error = ""  # empty when the whole answer came
        self.trace: dict[str, Any] = {}  # what our gateway tells of the request's path, if it was asked to

    def moment_of(self, token: int) -> float:
        """When token `token` (from 0) came; nan if it did not."""
        for moment, tokens in zip(self.moments, self.tokens, strict=True):
            if tokens > token:
                return moment
        return float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between the chunks that brought tokens."""
        return [b - a for a, b in pairwise(self.moments)]

    def note(self, moment: float, tokens: int) -> None:
        """By `moment` there are `tokens` tokens."""
        if tokens > (self.tokens[-1] if self.tokens else 0):
            self.moments.append(moment)
            self.tokens.append(tokens)


async def ask(session: aiohttp.ClientSession, path: str, body: bytes, answer: Answer) -> None:
    """Sends `body`, which asks for a stream, and fills `answer`. Raises CancelledError only."""
    answer.sent = now()
    try:
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            answer.status = response.status
            if response.status != HTTP_OK:
                answer.error = f"HTTP {response.status}: {_message(await response.read())}"
                return
            await _read(response, answer)
    except asyncio.CancelledError:
        answer.error = "interrupted"
        raise
    except TimeoutError:
        answer.error = f"no answer in time, after {len(answer.moments)} chunks"
    except (aiohttp.ClientError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:_SAID]
    finally:
        answer.ended = now()


def client(url: str, api_key: str = "", patience: float = PATIENCE) -> aiohttp.ClientSession:
    """A session for `url` without a limit on connections: an open load must never wait for one."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=patience)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20)


# ---- server-sent events ----


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def says_something(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    pdrelay: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    rest, done = b"", False
    async for data in response.content.iter_any():
        moment = now()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                done = True
            elif text:
                _take(text, moment, answer)
    if answer.error:
        return
    if not done:
        answer.error = f"the stream broke off after {answer.output_tokens} tokens"
    elif not answer.moments:
        answer.error = "the answer has no token"


def _take(text: bytes, moment: float, answer: Answer) -> None:
    try:
        chunk = _decoder.decode(text)
    except msgspec.DecodeError as error:
        answer.error = answer.error or f"a chunk cannot be read: {error}: {text[:80].decode(errors='replace')}"
        return
    if chunk.error is not None:
        answer.error = f"the stream says: {_said(chunk.error)}"
        return
    if chunk.pdrelay is not None and "pipeline" in chunk.pdrelay:
        answer.trace = chunk.pdrelay
    made = answer.tokens[-1] if answer.tokens else 0
    for choice in chunk.choices:
        made += len(choice.token_ids) if choice.token_ids is not None else choice.says_something()
        answer.finish_reason = choice.finish_reason or answer.finish_reason
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        answer.cached_tokens = (details and details.cached_tokens) or answer.cached_tokens
        # A count on every chunk is the truth; at the end it also says what chunks of several tokens hid.
        made = chunk.usage.completion_tokens or made
    if chunk.choices:
        answer.note(moment, made)
    answer.output_tokens = max(answer.output_tokens, made)


def _message(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:_SAID]
    return _said(found.get("error", found) if isinstance(found, dict) else found)


def _said(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_SAID]
