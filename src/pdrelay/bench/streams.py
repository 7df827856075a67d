"""Streamed completions with the time at which each token came."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from pdrelay.errors import BenchError

TIMEOUT_SECONDS = 600.0


class Stream(NamedTuple):
    """One answer. `arrivals[i]` is when token i came, in seconds since the request was sent."""

    arrivals: list[float]
    tiers: list[str]
    trace: Mapping[str, Any]


def fresh_prompt(rng: random.Random, tokens: int, vocabulary: int) -> list[int]:
    """Token ids that no cache knows."""
    return [rng.randrange(3, vocabulary) for _ in range(tokens)]


async def stream(
    client: httpx.AsyncClient,
    model: str,
    prompt: list[int],
    max_tokens: int,
    extension: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
) -> Stream:
    """To `max_tokens` whatever the model says, greedily unless `parameters` say otherwise.

    Raises BenchError when the answer is an error or has gaps.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "pdrelay": {"trace": True, **extension}, **(parameters or {}),
    }  # fmt: skip
    answer = Stream([], [], {})
    started = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_SECONDS) as response:
        if response.status_code != httpx.codes.OK:
            raise BenchError(f"the gateway answered {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer = _take(answer, json.loads(line.removeprefix("data: ")), time.monotonic() - started)
    if len(answer.arrivals) != max_tokens:
        raise BenchError(f"a stream had {len(answer.arrivals)} tokens, expected {max_tokens}")
    return answer


def _take(answer: Stream, chunk: dict[str, Any], now: float) -> Stream:
    if "error" in chunk:
        raise BenchError(f"a stream ended with an error: {chunk['error']}")
    extension = chunk.get("pdrelay") or {}
    if "tier" in extension:
        index = extension["index"]  # of the chunk's first token
        if index < len(answer.arrivals):
            raise BenchError(f"a stream went from token {len(answer.arrivals) - 1} back to {index}")
        _fill(answer, index)
        answer.arrivals.append(now)
        answer.tiers.append(extension["tier"])
    if "token_ids" not in extension:
        return answer
    _fill(answer, len(extension["token_ids"]))
    return answer._replace(trace=extension)


def _fill(answer: Stream, count: int) -> None:
    """The latest chunk had all tokens up to `count`."""
    missing = count - len(answer.arrivals)
    answer.arrivals.extend(answer.arrivals[-1:] * missing)
    answer.tiers.extend(answer.tiers[-1:] * missing)
