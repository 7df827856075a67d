"""Measures the lines of a deployment: prompts are computed at one end and their KV is awaited at the other."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from pdrelay.depot.base import Delivered, DepotControl, LinkEstimate, Transfer
from pdrelay.engine.base import Engine
from pdrelay.engine.messages import Finished, Open, Sampling
from pdrelay.errors import BenchError, ConfigError
from pdrelay.kv.demand import demand, published_tokens
from pdrelay.kv.names import Scope, prompt_pages, root

PATIENCE = 120.0
"""Seconds for one transfer."""
LEAST_TOKENS = 128
WAYS = 2
"""Round trips of a transfer that nobody prepared: the offer and what is lacking, the last page and its receipt."""


class LineSample(NamedTuple):
    """A link between two depots. Rates in bytes/s, times in seconds."""

    source: str
    target: str
    sizes: tuple[float, ...]
    rates: tuple[float, ...]  # of each transfer: bytes by the time that they took, without WAYS round trips
    measured_rate: float  # the depots' own estimate; 0 when they have none
    rtt: float


class End(NamedTuple):
    """An engine and its depot."""

    engine: Engine
    depot: DepotControl
    host: str


async def measure_line(
    source: End, target: End, prompt_tokens: int, repetitions: int, most_bytes: float = math.inf
) -> LineSample:
    """Sends the KV of `repetitions` new prompts, of about `most_bytes` at most.

    Raises ConfigError without an engine, BenchError when none arrives.
    """
    hello = source.engine.status.hello
    if hello is None:
        raise ConfigError(f"profile: engine {source.engine.instance} does not answer: {source.engine.status.detail}")
    fitting = max(LEAST_TOKENS, int(min(most_bytes / hello.contract.bytes_per_token, prompt_tokens)))
    tokens = min(prompt_tokens, fitting, hello.max_model_len - 2)
    async with _listening(source.depot) as heard:
        names = [f"profile-line/{time.time_ns()}/{number}" for number in range(repetitions)]
        moved = [await _send(source, target, tokens, name, heard) for name in names]
    estimate = heard.estimates.get(target.host)
    rtt = estimate.base_rtt if estimate else 0.0
    rates = tuple(size / max(seconds - WAYS * rtt, seconds / 2) for size, seconds in moved)
    measured = estimate.rate if estimate and estimate.measured else 0.0
    return LineSample(source.host, target.host, tuple(size for size, _ in moved), rates, measured, rtt)


class _Heard:
    """What the depot said."""

    def __init__(self) -> None:
        self.estimates: dict[str, LinkEstimate] = {}
        self.delivered: set[str] = set()
        self.news = asyncio.Event()


@asynccontextmanager
async def _listening(depot: DepotControl) -> AsyncIterator[_Heard]:
    heard = _Heard()

    async def listen() -> None:
        async for event in depot.events():
            match event:
                case LinkEstimate(to=to):
                    heard.estimates[to] = event
                case Delivered(xfer):
                    heard.delivered.add(xfer)
                    heard.news.set()
                case _:
                    pass

    task = asyncio.create_task(listen())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _send(source: End, target: End, tokens: int, xfer: str, heard: _Heard) -> tuple[float, float]:
    """Bytes of one prompt's KV, which the near depot has, and the seconds until the far one has its last page."""
    hello = source.engine.status.hello
    assert hello is not None
    prompt = random.Random(xfer).choices(range(1000, 40_000), k=tokens)  # noqa: S311 - a prompt nobody has sent
    contract, key = hello.contract, source.depot.fleet_key
    published = prompt[: published_tokens(tokens, contract.groups)]
    pages = prompt_pages(published, contract.page_tokens, root(Scope(contract.model, contract.revision), key), key)
    wanted = demand(pages, contract.groups)
    pinned = Transfer(xfer=f"{xfer}/pin", names=list(wanted.names), tails=wanted.tails)
    await source.depot.transfer(pinned)
    try:
        session = source.engine.open(Open(sid=xfer, mode="prefill", prompt=prompt, sampling=Sampling(max_tokens=2)))
        async for event in session.events():
            if isinstance(event, Finished):
                break
        began = time.perf_counter()
        await source.depot.transfer(
            Transfer(xfer=xfer, names=list(wanted.names), tails=wanted.tails, to=target.host,
                     addressee=target.engine.instance)
        )  # fmt: skip
        await _arrival(xfer, heard, source, target)
        return contract.bytes_per_token * tokens, max(time.perf_counter() - began, 1e-6)
    finally:
        await source.depot.end(xfer)
        await source.depot.end(pinned.xfer)


async def _arrival(xfer: str, heard: _Heard, source: End, target: End) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while xfer not in heard.delivered:
                heard.news.clear()
                await heard.news.wait()
    except TimeoutError as error:
        raise BenchError(
            f"profile: nothing came from {source.host} to {target.host} in {PATIENCE:.0f} s: {source.depot.trouble}"
        ) from error


def ends(
    instances: Mapping[str, tuple[str, list[str]]],
    engines: Mapping[str, Engine],
    depots: Mapping[str, DepotControl],
    source: list[str],
    target: list[str],
) -> tuple[End, End] | None:
    """A prefill instance on one of the hosts `source` and a decode instance on one of `target`, if there are.

    `instances` gives each instance's host and roles.
    """

    def find(hosts: list[str], role: str) -> End | None:
        for name, (host, roles) in instances.items():
            if host in hosts and role in roles:
                return End(engines[name], depots[host], host)
        return None

    first, last = find(source, "prefill"), find(target, "decode")
    return (first, last) if first is not None and last is not None else None
