"""The gateway's own code on emulated engines, in memory and in virtual time: nothing waits, nothing is measured late.

An event loop whose clock jumps to the next timer when nothing is left to do makes a deployment as deterministic as the
simulator: what differs between the two is what the simulator gets wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from whole import HOSTS, deployment

from pdrelay.bench import answers, open_load
from pdrelay.bench.answers import Answer
from pdrelay.bench.load_metrics import Timing, timing
from pdrelay.bench.open_load import OpenLoad, Pace, Send, Sent
from pdrelay.bench.prompts import Prompts
from pdrelay.cluster.config import Deployment
from pdrelay.cluster.units import parse_rate, parse_time
from pdrelay.depot.memory import MemoryDepot
from pdrelay.depot.memory_link import MemoryLink, link
from pdrelay.engine.base import SessionEvent
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import Sampling, ToEngine
from pdrelay.gateway.base import GenerationRequest
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.perf.profile import Profile
from pdrelay.workload.base import Request

FIRST_ID, IDS = 1000, 30_000
TICK = 1e-3
"""Seconds between two looks at the line."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything can be done, and then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        self._now += 1e-7  # or who waits for the rest of a moment that rounding leaves would wait for ever
        super()._run_once()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once: a thread would take time that is not ours."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualClock:
    """Of an emulated engine."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class DistantEngine(LocalEngine):
    """An engine behind a line with a round trip."""

    way = 0.0  # seconds, one direction
    _there = _back = 0.0  # when the latest message arrives

    def _send(self, message: ToEngine) -> None:
        self._there = self._later(self._there, self._table.take, message)

    def _deliver(self, event: SessionEvent) -> None:
        self._back = self._later(self._back, super()._deliver, event)

    def _later(self, latest: float, action: Callable[[Any], None], argument: object) -> float:
        """In order: timers of one moment do not come in that in which they were set."""
        loop = asyncio.get_running_loop()
        moment = max(loop.time() + self.way, latest + 1e-9)
        loop.call_at(moment, action, argument)
        return moment


class Messages:
    """Of a link in one direction, `way` seconds on their way."""

    def __init__(self, queue: deque[Any], arrive: Callable[[Any], None], line: MemoryLink, way: float) -> None:
        self._queue, self._deliver, self._line, self._way = queue, arrive, line, way
        self._latest = 0.0

    def take(self) -> None:
        """Sends what is there on its way. In order: timers of one moment do not come in that in which they were set."""
        loop = asyncio.get_running_loop()
        while self._queue:
            self._latest = max(loop.time() + self._way, self._latest + 1e-9)
            loop.call_at(self._latest, self._arrive, self._queue.popleft())

    def _arrive(self, message: Any) -> None:
        with self._line.source.lock:
            self._deliver(message)


async def carry(line: MemoryLink, rate: float, way: float) -> None:
    """Moves batches at `rate` bytes/s. They, and messages both ways, arrive `way` seconds after they were sent."""
    loop = asyncio.get_running_loop()
    forth = Messages(line._forth, line.arrive_forth, line, way)
    back = Messages(line._back, line.arrive_back, line, way)
    while True:
        forth.take()
        back.take()
        with line.source.lock:
            batch = line._next_batch()
        if batch is None:
            await asyncio.sleep(TICK)
            continue
        await asyncio.sleep(batch.line_bytes / rate)
        loop.call_later(way, land, line, batch)


def land(line: MemoryLink, batch: Any) -> None:
    """A batch arrives."""
    source, target = line.source.hub, line.target.hub
    with line.source.lock:
        landed = line._copy(batch)
        source.senders.outbox.written(batch)
        source.senders.outbox.acknowledged(batch)
        target.receivers.landed(landed)
        target.settle()
        source.settle()


class VirtualTrio:
    """Prefill and relay in dc-a, main decode in dc-b. Construct inside a running VirtualLoop."""

    def __init__(self, deployed: Deployment, profile: Profile) -> None:
        loop = asyncio.get_running_loop()
        self.deployment, self.profile = deployed, profile
        contract = profile.contract("m")
        depots = {name: MemoryDepot(name, 64 << 20, clock=loop.time) for name in ("host-a", "host-b")}
        wan = deployed.link[0]
        self._line = asyncio.create_task(
            carry(
                link(depots["host-a"], depots["host-b"], stepped=True, batch_bytes=1 << 16),
                parse_rate(wan.rate),
                parse_time(wan.rtt) / 2,
            )
        )
        self._backends: list[EmulatedBackend] = []
        engines: dict[str, LocalEngine] = {}
        for name, host in HOSTS.items():
            backend = self._backend(name, depots[host], contract)
            self._backends.append(backend)
            engines[name] = DistantEngine(backend, clock=loop.time)
        engines["md-0"].way = parse_time(wan.rtt) / 2
        self._coordinator = Coordinator(deployed, engines, {name: d.control() for name, d in depots.items()})

    def _backend(self, name: str, depot: MemoryDepot, contract: Any) -> EmulatedBackend:
        def connect() -> Any:
            return depot.engine(name, contract)

        return EmulatedBackend(
            instance=name, model="m", max_model_len=8192, profile=self.profile, control=depot.control(),
            depot=HostDepot(connect(), connect), publish_decode=name == "md-0", clock=VirtualClock(),
        )  # fmt: skip

    async def aclose(self) -> None:
        await self._coordinator.aclose()
        for backend in self._backends:
            await backend.aclose()
        self._line.cancel()
        await asyncio.gather(self._line, return_exceptions=True)

    async def play(self, requests: Sequence[Request], seed: int) -> list[Timing]:
        """Plays the requests as `pdrelay bench serve` does, at the gateway's inner door."""
        prompts = Prompts(IDS, seed)
        ended: list[Sent] = []

        def prepare(number: int, request: Request) -> Send:
            prompt = [FIRST_ID + symbol for symbol in prompts.symbols(number, request)]
            return lambda answer: self._ask(f"r{seed}-{number}", prompt, request.output, answer)

        longest = max(turn.cached for request in requests for turn in request.turns())
        if longest > 0:  # every cache is shown what declared hit rates mean
            warm = Request(0.0, longest + 16, 8, cached=longest)
            await prepare(-1, warm)(Answer())
            await asyncio.sleep(5.0)
        load = OpenLoad(prepare, Pace(), ended.append)
        await load.run(requests)
        return [timing(sent, load.started) for sent in ended]

    async def _ask(self, name: str, prompt: list[int], output: int, answer: Answer) -> None:
        answer.sent = time.monotonic()
        sampling = Sampling(max_tokens=output, ignore_eos=True, temperature=0.0)
        run = self._coordinator.generate(GenerationRequest(name, time.monotonic(), prompt, sampling))
        async for batch in run:
            answer.output_tokens += len(batch.ids)
            answer.note(time.monotonic(), answer.output_tokens)
        await run.aclose()
        answer.ended = time.monotonic()


def in_virtual_time(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Awaitable[Any]]) -> Any:
    """Runs `work` in a VirtualLoop, whose time is everybody's meanwhile."""
    loop = VirtualLoop()
    with monkeypatch.context() as patch, contextlib.closing(loop):
        patch.setattr(time, "monotonic", loop.time)
        for module in (answers, open_load):
            patch.setattr(module, "now", loop.time)
        return loop.run_until_complete(work())


def trio_deployment(rate: str, rtt: str, **policy: Any) -> Deployment:
    """The deployment of tests/gateway/whole.py with another line."""
    base = deployment(**policy)
    model = msgspec.structs.replace(base.model, max_model_len=8192)
    return msgspec.structs.replace(base, model=model, link=[msgspec.structs.replace(base.link[0], rate=rate, rtt=rtt)])
