"""The process that plays the comparison's requests, where the gateway is; what ended is told at once, line by line.

    python -m pdrelay.bench.compare.player

A `Job` comes on standard input as one line of JSON. The first line of the answer is `ready`, each further one a
`Played`, the last one empty.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable
from typing import Any

import aiohttp
import msgspec

from pdrelay.bench.answers import HTTP_OK, Answer, ask, client, now
from pdrelay.bench.endpoint import VLLM, Target
from pdrelay.bench.open_load import OpenLoad, Pace, Send, Sent
from pdrelay.bench.prompts import Prompts
from pdrelay.workload.base import Request

READY_SECONDS = 120.0
IDS = range(400, 4000)
"""Token ids of words in every vocabulary that emulated engines have."""


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One request: `cached` tokens of the prompt are common to all."""

    arrival: float
    prompt: int
    output: int
    cached: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to play, in real seconds."""

    url: str
    model: str
    requests: list[Planned]
    warm: int  # tokens of the common prefix that caches are shown before
    warm_extension: dict[str, Any]  # the `pdrelay` parameter of those requests
    extension: dict[str, Any]  # the `pdrelay` parameter of the others
    seed: int
    ids: tuple[int, int] = (IDS.start, IDS.stop)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended, in real seconds since it was due; None is what did not happen."""

    number: int
    due: float  # since the load's start
    lag: float
    output: int
    moments: list[float]  # of each chunk that brought tokens, and how many there were by then
    tokens: list[int]
    trace: dict[str, Any]
    error: str


async def play(job: Job) -> None:
    """Plays all. Raises what a request before the measurement, or the gateway's start, raised."""
    requests = [Request(p.arrival, p.prompt, p.output, cached=p.cached) for p in job.requests]
    target = Target("completions", job.model, VLLM, range(*job.ids), 0)
    prompts = Prompts(len(target.alphabet), job.seed)
    async with client(job.url) as session:
        await _healthy(session)
        warm = prompts.warm(max(job.warm, *(request.cached for request in requests)))
        for number in range(2):
            symbols = [*warm, *prompts.symbols(-1 - number, Request(0.0, 32, 1))]
            await _asked(session, target.body(symbols, 8, {"pdrelay": job.warm_extension}), target.path)
        print("ready", flush=True)

        def prepare(number: int, request: Request) -> Send:
            body = target.body(prompts.symbols(number, request), request.output, {"pdrelay": job.extension})

            def send(answer: Answer) -> Awaitable[None]:
                return ask(session, target.path, body, answer)

            return send

        load = OpenLoad(prepare, Pace(), lambda sent: _tell(sent, load.started))
        await load.run(requests)


async def _healthy(session: aiohttp.ClientSession) -> None:
    """Waits until every instance is, as far as it is told."""
    deadline, found = time.monotonic() + READY_SECONDS, "no answer"
    while True:
        try:
            async with session.get("/health") as response:
                found = _troubles(await response.read())
                if response.status == HTTP_OK and not found:
                    return
        except (aiohttp.ClientError, OSError) as error:
            found = str(error)
        if time.monotonic() > deadline:
            sys.exit(f"not ready after {READY_SECONDS:g} s: {found}")
        await asyncio.sleep(0.1)


def _troubles(health: bytes) -> str:
    """What our gateway says of instances that are down; others say nothing but their status."""
    try:
        states = msgspec.json.decode(health, type=list[dict[str, Any]])
    except msgspec.DecodeError:
        return ""
    return "; ".join(f"{state['instance']}: {state['detail']}" for state in states if not state["healthy"])


async def _asked(session: aiohttp.ClientSession, body: bytes, path: str) -> None:
    answer = Answer()
    await ask(session, path, body, answer)
    if answer.error:
        sys.exit(f"a request before the measurement failed: {answer.error}")


def _tell(sent: Sent, started: float) -> None:
    answer, due = sent.answer, sent.due
    played = Played(
        number=sent.number, due=due - (started or now()), lag=sent.lag if answer.sent else 0.0,
        output=answer.output_tokens, moments=[round(moment - due, 5) for moment in answer.moments],
        tokens=answer.tokens, trace={**answer.trace, "token_ids": None}, error=answer.error,
    )  # fmt: skip
    print(msgspec.json.encode(played).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(play(msgspec.json.decode(sys.stdin.readline(), type=Job)))
    print(flush=True)
