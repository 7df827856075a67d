"""The conversation of `pdrelay chat`: streams answers, colours tokens by tier, tells the times."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Self

import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from pdrelay.errors import EngineUnavailableError, RequestError

STYLES = {"prefill": "bold magenta", "relay": "yellow", "main": "green"}
"""Colour of each tier's tokens; its name in the legend."""

Trace = dict[str, Any]
"""`Trace` of the gateway as JSON."""


class Piece(NamedTuple):
    """One piece of an answer. `trace` comes with the last."""

    text: str
    tier: str | None = None
    trace: Trace | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    pdrelay: dict[str, Any] = {}
    error: _Error | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_chunks = msgspec.json.Decoder(_Chunk)


class Client:
    """Speaks to one gateway. Raises RequestError when it refuses, EngineUnavailableError when it is not there."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # The environment's web proxy may be meant for other machines, not for this one.
        local = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
        self._http = httpx.Client(timeout=httpx.Timeout(10, read=None), mounts=local)

    def close(self) -> None:
        """Ends the connection."""
        self._http.close()

    def model(self) -> str:
        """Name of the model that is served."""
        with self._errors():
            response = self._http.get(f"{self._url}/models")
            self._check(response)
            return msgspec.json.decode(response.content, type=_Models).data[0].id

    def stream(self, body: dict[str, object]) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come."""
        body = {**body, "stream": True, "pdrelay": {"trace": True}}
        with self._errors(), self._http.stream("POST", f"{self._url}/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
            self._check(response)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield _piece(_chunks.decode(line.removeprefix("data: ")))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise RequestError(f"--url: found {self._url!r}, expected such as http://127.0.0.1:8000/v1") from error
        except httpx.ConnectError as error:
            raise EngineUnavailableError(f"nothing answers at {self._url} (is it started? `pdrelay up`)") from error
        except httpx.HTTPError as error:
            raise EngineUnavailableError(f"{self._url}: {error or type(error).__name__}") from error
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineUnavailableError(f"{self._url}: not an OpenAI-compatible answer: {error}") from error

    def _check(self, response: httpx.Response) -> None:
        if response.is_error:
            try:
                message = msgspec.json.decode(response.content, type=_ErrorBody).error.message
            except msgspec.DecodeError:
                message = f"{self._url}: {response.status_code} {response.reason_phrase}"
            raise RequestError(message, status=response.status_code)


def _piece(chunk: _Chunk) -> Piece:
    if chunk.error is not None:
        raise EngineUnavailableError(chunk.error.message)
    text = "".join(choice.delta.content or "" for choice in chunk.choices)
    trace = chunk.pdrelay if "pipeline" in chunk.pdrelay else None
    return Piece(text, chunk.pdrelay.get("tier"), trace)


class Chat:
    """A conversation with its history."""

    def __init__(self, url: str, max_tokens: int, temperature: float, as_json: bool) -> None:
        self._client, self._as_json = Client(url), as_json
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self._console = Console(highlight=False, soft_wrap=True)
        self._messages: list[dict[str, str]] = []
        self._model = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, prompt: str) -> int:
        """One question and its answer; the exit code."""
        self._open()
        return 0 if self._answer(prompt) else 130

    def converse(self) -> int:
        """Questions and answers until /exit or the end of input; the exit code."""
        self._open()
        if not self._as_json:
            self._console.print(f"{self._model}; /exit or Ctrl-D ends, Ctrl-C ends an answer")
        while (prompt := self._read()) is not None:
            if prompt:
                self._try_answer(prompt)
        return 0

    def _open(self) -> None:
        self._model = self._client.model()
        if not self._as_json:
            legend = Text("tokens by ")
            for tier, style in STYLES.items():
                legend.append(f"{tier} ", style)
            self._console.print(legend)

    def _read(self) -> str | None:
        """The next question; None at the end."""
        try:
            # A prompt is for people: not where input comes from a pipe.
            prompt = input("> " if sys.stdin.isatty() and not self._as_json else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._console.print()
            return ""
        return None if prompt == "/exit" else prompt

    def _try_answer(self, prompt: str) -> None:
        """As `_answer`; an error ends the answer, not the conversation."""
        try:
            self._answer(prompt)
        except (RequestError, EngineUnavailableError) as error:
            self._messages.pop()
            print(f"pdrelay: {error}", file=sys.stderr)

    def _answer(self, prompt: str) -> bool:
        """Streams one answer into terminal and history; False when the user cut it short."""
        self._messages.append({"role": "user", "content": prompt})
        pieces: list[Piece] = []
        stream = self._client.stream({"model": self._model, "messages": self._messages, **self._sampling})
        try:
            with contextlib.closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    self._show(piece)
            whole = True
        except KeyboardInterrupt:
            whole = False
        self._messages.append({"role": "assistant", "content": "".join(piece.text for piece in pieces)})
        self._close_answer(pieces, whole)
        return whole

    def _show(self, piece: Piece) -> None:
        if piece.text and not self._as_json:
            self._console.print(Text(piece.text, STYLES.get(piece.tier or "", "")), end="")

    def _close_answer(self, pieces: list[Piece], whole: bool) -> None:
        trace = next((piece.trace for piece in reversed(pieces) if piece.trace is not None), None)
        if self._as_json:
            parts = [{"text": piece.text, "tier": piece.tier} for piece in pieces if piece.text]
            text = self._messages[-1]["content"]
            print(json.dumps({"text": text, "pieces": parts, "complete": whole, "pdrelay": trace}), flush=True)
            return
        self._console.print()
        if trace is not None:
            self._console.print(Text(summary(trace), "dim"))
        elif not whole:
            self._console.print(Text("cut short", "dim"))


def summary(trace: Trace) -> str:
    """The closing line of an answer."""
    parts = [trace["pipeline"]]
    for name, key in (("prefill", "prefill_done"), ("first token", "first_token"), ("second token", "second_token")):
        if trace.get(key) is not None:
            parts.append(f"{name} {_seconds(trace[key])}")
    parts.append(_handoff(trace))
    if trace.get("finished") is not None:
        parts.append(f"all {_seconds(trace['finished'])}")
    tokens = [f"{trace.get(f'{tier}_tokens', 0)} {tier}" for tier in STYLES]
    parts.append(f"tokens {' + '.join(tokens)}")
    parts.append(f"line {_size(trace.get('wan_bytes', 0))} sent, {_size(trace.get('wan_bytes_saved', 0))} saved")
    return " | ".join(parts)


def _handoff(trace: Trace) -> str:
    index, start, done = trace.get("handoff_index"), trace.get("handoff_start"), trace.get("handoff_done")
    if index is None:
        return "no handoff"
    gap = f", gap {_seconds(done - start)}" if start is not None and done is not None else ""
    return f"handoff at {index} ({trace.get('handoff_mode')}{gap})"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
