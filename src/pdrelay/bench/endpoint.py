"""What a load tool must know of an OpenAI endpoint: its model, what it takes, and how to write prompts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from pdrelay.bench.answers import HTTP_OK, Answer, ask
from pdrelay.errors import BenchError

Kind = Literal["completions", "chat"]
PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

VLLM: dict[str, Any] = {
    "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip
"""Answers of the wanted length, and the count of tokens on every chunk. Ours and vLLM take these."""
PLAIN: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}
"""What every OpenAI endpoint takes: answers end where the model says, a chunk counts as a token."""

HIGHEST_IDS = (32_000, 8000, 4000, 2000, 1000, 250)
"""Token ids are taken from below the highest of these that the endpoint takes; special and byte tokens lie below a
tenth of it."""

WORDS = (
    "time", "year", "work", "life", "hand", "part", "side", "head", "home", "door", "book", "word", "name", "line",
    "city", "game", "food", "land", "road", "fact", "case", "team", "week", "idea", "body", "back", "face", "kind",
    "room", "area", "girl", "list", "wife", "moon", "tree", "fish", "bird", "rain", "snow", "wind", "fire", "gold",
    "iron",
)  # fmt: skip
_REPEATED = 17
_AT_ONCE = 8


class Target(NamedTuple):
    """An endpoint, probed."""

    kind: Kind
    model: str
    dialect: Mapping[str, Any]  # parameters that go with every request
    alphabet: Sequence[int] | Sequence[str]  # token ids, or words of one token each
    overhead: int  # prompt tokens that the chat template adds

    @property
    def exact_lengths(self) -> bool:
        """Whether answers have the length that was asked for."""
        return bool(self.dialect.get("ignore_eos"))

    @property
    def path(self) -> str:
        """Where requests go."""
        return PATHS[self.kind]

    def body(self, symbols: Sequence[int], output: int, extra: Mapping[str, Any] | None = None) -> bytes:
        """The body of a request for `output` tokens after a prompt of symbols of the alphabet."""
        return _body(self.kind, self.model, self.dialect, self._prompt(symbols), output, extra or {})

    def _prompt(self, symbols: Sequence[int]) -> list[int] | str:
        alphabet = self.alphabet
        if isinstance(alphabet[0], str):
            return "".join(f" {alphabet[symbol]}" for symbol in symbols)
        return [alphabet[symbol] for symbol in symbols]  # type: ignore[misc]  # one type or the other, by the first


async def probe(session: aiohttp.ClientSession, kind: Kind, model: str = "", *, words: bool = False) -> Target:
    """Asks the endpoint what it is; with `words` prompts are text. Raises BenchError when it does not serve."""
    model = model or await _model(session)
    prompt = _words(3)
    dialect: Mapping[str, Any] = VLLM
    answer = await _try(session, _body(kind, model, VLLM, prompt, 2, {}), kind)
    if answer.status in (400, 422):
        dialect = PLAIN
        answer = await _try(session, _body(kind, model, PLAIN, prompt, 2, {}), kind)
    if answer.error:
        raise BenchError(f"endpoint: {PATHS[kind]} does not answer a small request: {answer.error}")
    if kind == "completions" and not words and (ids := await _ids(session, model, dialect)):
        return Target(kind, model, dialect, ids, 0)
    return await _of_words(session, kind, model, dialect)


async def _model(session: aiohttp.ClientSession) -> str:
    try:
        async with session.get("/v1/models") as response:
            body = await response.read()
            if response.status != HTTP_OK:
                raise BenchError(f"endpoint: /v1/models answers HTTP {response.status}; name the model with --model")
            return str(msgspec.json.decode(body)["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"endpoint: nothing serves there: {error}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise BenchError("endpoint: /v1/models lists no model; name one with --model") from error


async def _ids(session: aiohttp.ClientSession, model: str, dialect: Mapping[str, Any]) -> range | None:
    """Token ids that the endpoint takes; None when it takes text only."""
    for highest in HIGHEST_IDS:
        answer = await _try(session, _body("completions", model, dialect, [highest - 1] * 3, 1, {}), "completions")
        if not answer.error and answer.prompt_tokens in (0, 3):
            return range(highest // 10, highest)
    return None


async def _of_words(session: aiohttp.ClientSession, kind: Kind, model: str, dialect: Mapping[str, Any]) -> Target:
    """Finds words that are one token each, wherever they stand."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def length(text: str) -> int:
        async with slots:
            return (await _try(session, _body(kind, model, dialect, text, 1, {}), kind)).prompt_tokens

    once = await asyncio.gather(*(length(f" {word}") for word in WORDS))
    often = await asyncio.gather(*(length(f" {word}" * _REPEATED) for word in WORDS))
    single = [word for word, a, b in zip(WORDS, once, often, strict=True) if a and b - a == _REPEATED - 1]
    if len(single) < 2:
        raise BenchError(
            "endpoint: its usage does not say how many tokens words have, or they have several each; "
            "use --endpoint completions with token ids"
        )
    overhead = min(a for word, a in zip(WORDS, once, strict=True) if word in single) - 1
    return Target(kind, model, dialect, single, overhead)


async def _try(session: aiohttp.ClientSession, body: bytes, kind: Kind) -> Answer:
    answer = Answer()
    await ask(session, PATHS[kind], body, answer)
    return answer


def _words(count: int) -> str:
    return "".join(f" {word}" for word in WORDS[:count])


def _body(
    kind: Kind, model: str, dialect: Mapping[str, Any], prompt: list[int] | str, output: int, extra: Mapping[str, Any]
) -> bytes:
    asked = {"prompt": prompt} if kind == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    return msgspec.json.encode({"model": model, **asked, "max_tokens": output, "stream": True, **dialect, **extra})
