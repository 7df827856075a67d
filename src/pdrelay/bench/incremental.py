"""How main decode can get the KV of the tokens that the relay made (PDD, Table 5): by computing it from their ids, or
by having it sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from pdrelay.bench.producer import Producer, fresh_names, template_of
from pdrelay.bench.streams import fresh_prompt
from pdrelay.bench.trio import Trio
from pdrelay.cluster.config import GATEWAY
from pdrelay.cluster.tls import client_context
from pdrelay.cluster.topology import Role
from pdrelay.depot.base import Delivered, Transfer
from pdrelay.depot.control_client import ControlClient, control_over_unix
from pdrelay.engine.client import WebSocketEngine
from pdrelay.engine.messages import Extend, Extended, Failed, Hello, Open, Opened, Sampling, ToEngine, encode
from pdrelay.errors import BenchError

READY_SECONDS = 30.0
TIMEOUT_SECONDS = 120.0
PROMPT_TOKENS = 256
BACKGROUND_PAGES = 8
"""Pages of each transfer that loads the line; as soon as one is there the next begins."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One way to bring one number of tokens over. Seconds."""

    way: str  # `recompute` or `ship`
    line: str  # `idle` or `loaded`
    tokens: int
    bytes: int
    mean: float
    max: float
    deviation: float
    samples: list[float]


async def measure(
    trio: Trio, sizes: Sequence[int], rounds: int, vocabulary: int, progress: Callable[[str], None]
) -> list[Cost]:
    """Both ways, on an idle and on a loaded line. Raises BenchError, DepotError, EngineError."""
    async with _engine(trio) as (engine, hello), _depots(trio, hello) as shipping:
        costs = []
        for line in ("idle", "loaded"):
            progress(f"tokens brought over an {line} line" if line == "idle" else "... over a loaded line")
            async with shipping.load(line == "loaded"):
                costs += await _recompute(engine, sizes, rounds, vocabulary, line)
                costs += await shipping.measure(sizes, rounds, line)
        return costs


# By ids


async def _recompute(
    engine: WebSocketEngine, sizes: Sequence[int], rounds: int, vocabulary: int, line: str
) -> list[Cost]:
    rng = random.Random(1)  # noqa: S311 - not for secrets
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    payload: dict[int, int] = {}
    for number in range(rounds):
        sid = f"bench-{line}-{number}"
        session = engine.open(
            Open(
                sid=sid, mode="decode", prompt=fresh_prompt(rng, PROMPT_TOKENS, vocabulary),
                sampling=Sampling(max_tokens=sum(sizes) + 1, temperature=0.0, ignore_eos=True),
            )
        )  # fmt: skip
        try:
            events = session.events()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await _next(events, Opened)
                for size in sizes:
                    ids = fresh_prompt(rng, size, vocabulary)
                    chunk: list[ToEngine] = [Extend(sid, ids)]
                    payload[size] = len(encode(chunk))
                    started = time.monotonic()
                    session.extend(ids)
                    await _next(events, Extended)
                    samples[size].append(time.monotonic() - started)
        finally:
            session.abort()
    return [_cost("recompute", line, size, payload[size], samples[size]) for size in sizes]


async def _next(events: AsyncIterator[object], kind: type) -> None:
    async for event in events:
        if isinstance(event, Failed):
            raise BenchError(f"main decode failed: {event.message}")
        if isinstance(event, kind):
            return
    raise BenchError(f"a session ended before {kind.__name__}")


@asynccontextmanager
async def _engine(trio: Trio) -> AsyncIterator[tuple[WebSocketEngine, Hello]]:
    instance = next(i for i in trio.deployment.instance if Role.DECODE in i.roles)
    tls = client_context(trio.deployment.tls.directory, GATEWAY)
    engine = WebSocketEngine(instance.name, instance.address or instance.listen, tls, server_name=instance.name)
    try:
        async with asyncio.timeout(READY_SECONDS):
            while engine.status.hello is None or not engine.status.healthy:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
        yield engine, engine.status.hello
    except TimeoutError as error:
        raise BenchError(f"{instance.name} was not reached in {READY_SECONDS:g} s: {engine.status.detail}") from error
    finally:
        await engine.aclose()


# By KV


class Shipping:
    """Pages published at the depot beside prefill and sent to the one beside main decode."""

    def __init__(self, control: ControlClient, producer: Producer, to: str, hello: Hello) -> None:
        self._control, self._producer, self._to, self._contract = control, producer, to, hello.contract
        self._numbers = count()

    async def measure(self, sizes: Sequence[int], rounds: int, line: str) -> list[Cost]:
        """Times from the wish to the last page's arrival."""
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(rounds):
            for size in sizes:
                samples[size].append(await self.ship(self._pages(size)))
        page = self._contract.page_bytes
        return [_cost("ship", line, size, self._pages(size) * page, samples[size]) for size in sizes]

    @asynccontextmanager
    async def load(self, loaded: bool) -> AsyncIterator[None]:
        """Keeps the line busy with another transfer as long as the context is open."""
        task = asyncio.create_task(self._keep_busy()) if loaded else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def ship(self, pages: int) -> float:
        """Sends fresh pages; the time it took."""
        owner, names = f"bench-{next(self._numbers)}", fresh_names(pages)
        await asyncio.to_thread(self._producer.publish, owner, names)
        try:
            started = time.monotonic()
            arrived = asyncio.create_task(self._arrival(owner))
            await asyncio.sleep(0)  # it listens before the transfer can be done
            await self._control.transfer(Transfer(xfer=owner, names=names, to=self._to))
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await arrived
            return time.monotonic() - started
        finally:
            await self._control.end(owner)
            await asyncio.to_thread(self._producer.release, owner)

    async def _arrival(self, xfer: str) -> None:
        async for event in self._control.events():
            if isinstance(event, Delivered) and event.xfer == xfer:
                return

    async def _keep_busy(self) -> None:
        while True:
            await self.ship(BACKGROUND_PAGES)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._contract.page_tokens)


@asynccontextmanager
async def _depots(trio: Trio, hello: Hello) -> AsyncIterator[Shipping]:
    hosts = {host.name: host for host in trio.deployment.host}
    source = hosts[next(i.host for i in trio.deployment.instance if Role.PREFILL in i.roles)]
    target = hosts[next(i.host for i in trio.deployment.instance if Role.DECODE in i.roles)]
    control = control_over_unix(source.socket, "bench")
    try:
        await control.ready(READY_SECONDS)
        producer = await asyncio.to_thread(
            Producer, Path(source.socket), "bench", hello.contract, template_of(hello.contract)
        )
        try:
            yield Shipping(control, producer, target.name, hello)
        finally:
            producer.close()
    finally:
        await control.aclose()


def _cost(way: str, line: str, tokens: int, size: int, samples: list[float]) -> Cost:
    values = np.array(samples)
    return Cost(
        way=way, line=line, tokens=tokens, bytes=size, mean=float(values.mean()), max=float(values.max()),
        deviation=float(values.std(ddof=1)) if len(values) > 1 else 0.0, samples=samples,
    )  # fmt: skip
