"""Depots p and d, a line that breaks between them, and transfers that go on all the same."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest
from depot_kit import names, production_of, until, write_parts
from fault_line import WAYS, FaultLine
from link_kit import SHAPE, Site

from pdrelay.depot.base import DepotEvent, LinkState, PageKind, Stalled, Transfer
from pdrelay.depot.checksums import unpack_checksums, wrong_parts
from pdrelay.depot.engine_client import SocketEngineDepot, connect_engine
from pdrelay.depot.link import DepotLink
from pdrelay.errors import ArenaFullError, DepotUnavailableError
from pdrelay.wan.shaper import Lane

Encryption = Literal["tls", "control"]
AT_ONCE = 8
"""Transfers."""

RATE = 40e6
CONNECTIONS = 3
HUNG_SECONDS = 40.0
"""A transfer that has not ended so long after its start hangs."""

SHARED = range(16)
"""Numbers of pages that many transfers share; others are of one transfer."""


class Clock:
    """A monotonic clock that can be made to jump."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Place:
    """A depot that can be killed and started again, with the engine beside it."""

    def __init__(self, name: str, pages: int, tmp_path: Path, tls: Path, encryption: Encryption) -> None:
        self.name, self.clock = name, Clock()
        self._site = lambda stack: Site(
            name, stack, tmp_path, tls, pages, clear=["p"] if encryption == "control" else (), clock=self.clock
        )
        self.starts = 0
        self.site: Site
        self.engine: SocketEngineDepot
        self.link: DepotLink | None = None
        self._stack = AsyncExitStack()
        self._former: list[SocketEngineDepot] = []

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        self.site = self._site(self._stack)
        await self.site.start()
        self.engine = await asyncio.to_thread(connect_engine, self.site.socket, f"engine-{self.name}", SHAPE)
        self._former.append(self.engine)
        self.starts += 1

    async def kill(self) -> None:
        """All its connections break, its arena is gone."""
        if self.link is not None:
            self.link.lanes_broken("killed")
        await self._stack.aclose()

    async def forget_former_engines(self) -> None:
        """Closes them. No thread may use them any more."""
        while self._former[1:]:
            await asyncio.to_thread(self._former.pop(0).close)

    async def aclose(self) -> None:
        await self.forget_former_engines()
        await asyncio.to_thread(self.engine.close)
        await self._stack.aclose()


class Rig:
    """Depots p and d, the line between them, and transfers over it."""

    def __init__(self, tmp_path: Path, tls: Path, seed: int, encryption: Encryption) -> None:
        self.rng = random.Random(seed)
        self.p, self.d = (Place(name, pages, tmp_path, tls, encryption) for name, pages in (("p", 160), ("d", 56)))
        self.encryption: Encryption = encryption
        self.ended: Counter[str] = Counter()
        self.events: list[DepotEvent] = []
        self._numbers = len(SHARED)
        self._stalled: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        await self.d.start()
        self.line = FaultLine(self.d.site.listener.port, self.rng)
        await self.line.start(RATE)
        await self.start_p()
        try:
            await self.up()
            yield self
        finally:
            await self.p.aclose()
            await self.d.aclose()
            await self.line.aclose()

    async def start_p(self) -> None:
        await self.p.start()
        self.p.link = self.p.site.link(
            "d", self.line.control, self.line.bulk, connections=CONNECTIONS, rate=RATE, encryption=self.encryption
        )
        self.p.site.hub.subscribe(self._hear)

    async def up(self) -> None:
        await until(lambda: self.p.site.hub.links.up().get("d", False), 20)

    def _hear(self, event: DepotEvent) -> None:
        if isinstance(event, LinkState):
            self.events.append(event)
        if isinstance(event, Stalled) and event.xfer in self._stalled:
            self._stalled[event.xfer].set()

    # Transfers

    async def transfer(self, xfer: str) -> None:
        """One transfer from its offer to its end; counts how it ended."""
        at_p = self.p.starts
        own = range(self._numbers, self._numbers + self.rng.randint(1, 5))
        self._numbers = own.stop
        pages = names(*range(self.rng.randint(0, len(SHARED) // 4)), *own)
        tails = self.rng.randint(0, 1)
        stalled = self._stalled[xfer] = asyncio.Event()
        stalled.set()  # nobody has produced anything
        hub = self.p.site.hub
        try:
            wish = Transfer(
                xfer=xfer, names=pages, tails=tails, to="d", addressee="engine-d", background=self.rng.random() < 0.2
            )
            hub.transfer(wish, "gateway")
            reading = asyncio.create_task(self._read(xfer, pages))
            try:
                async with asyncio.timeout(HUNG_SECONDS):
                    how = await self._produce_until(reading, xfer, pages, tails, at_p)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        except TimeoutError:
            pytest.fail(f"{xfer} hangs: {self._describe(xfer)}")
        finally:
            del self._stalled[xfer]
            hub.end(xfer)
        self.ended[how] += 1

    async def _produce_until(
        self, reading: asyncio.Task[None], xfer: str, pages: list[bytes], tails: int, at_p: int
    ) -> str:
        """Prefills whenever nobody does, until all was read at d or the transfer's depot died."""
        stalled = self._stalled[xfer]
        given_up = time.monotonic() + (self.rng.uniform(0, 0.5) if self.rng.random() < 0.15 else math.inf)
        while True:
            if time.monotonic() > given_up:
                return "given up by its gateway"
            if self.p.starts != at_p:
                return "its depot died"
            if stalled.is_set():
                stalled.clear()
                try:
                    await asyncio.to_thread(self._prefill, self.p.engine, xfer, pages, tails)
                except (DepotUnavailableError, ArenaFullError) as error:
                    return type(error).__name__
            await asyncio.wait([reading], timeout=0.1)
            if reading.done():
                reading.result()
                return "delivered"

    def _prefill(self, engine: SocketEngineDepot, xfer: str, pages: list[bytes], tails: int) -> None:
        kinds = [PageKind.PREFIX] * (len(pages) - tails) + [PageKind.TRANSFER] * tails
        production = random.randrange(1 << 32)
        try:
            for page, offset in zip(pages, engine.reserve(xfer, pages, kinds), strict=True):
                if offset is not None:
                    write_parts(engine, xfer, page, offset, SHAPE, range(SHAPE.layout_of(page).parts), production)
        finally:
            engine.release(xfer)

    async def _read(self, xfer: str, pages: list[bytes]) -> None:
        """As an engine loads: waits at d, verifies, has what is broken fetched again."""
        while True:
            site, engine = self.d.site, self.d.engine
            try:
                if all(map(site.hub.index.complete, pages)) and await asyncio.to_thread(
                    self._load, engine, xfer, pages
                ):
                    return
            except DepotUnavailableError:
                pass  # it was killed
            await asyncio.sleep(0.02)

    def _load(self, engine: SocketEngineDepot, xfer: str, pages: list[bytes]) -> bool:
        """Whether all was there and fits; what fits its checksums must be what was written."""
        leased = engine.lease(xfer, pages).pages
        try:
            for page, lease in zip(pages, leased, strict=False):
                layout = SHAPE.layout_of(page)
                checksums = unpack_checksums(lease.checksums)
                data = engine.arena[lease.offset : lease.offset + layout.page_bytes]
                if wrong_parts(data, checksums):
                    engine.corrupt(xfer, [page])
                    return False
                # A bit may turn over after the look above; whoever reads next will see that.
                if production_of(engine, page, lease.offset, SHAPE) is None:
                    assert wrong_parts(data, checksums), "checksums fit, bytes differ"
                    return False
            return len(leased) == len(pages)
        finally:
            engine.release(xfer)

    def _describe(self, xfer: str) -> str:
        hubs = self.p.site.hub, self.d.site.hub
        sending, receiving = hubs[0].senders._live.get(xfer), hubs[1].receivers._live.get(("p", xfer))
        wanted = [(w.epoch, w.missing, w.flying) for w in sending.wanted.values()] if sending is not None else None
        lacking = [self._fetched(name) for name in receiving.lacking] if receiving is not None else None
        return f"wanted {wanted}, lacking {lacking}, {[hub.stats() for hub in hubs]}, {self.events[-3:]}"

    def _fetched(self, name: bytes) -> tuple[object, ...]:
        fetch = self.d.site.hub.receivers._fetches.get(name)
        return (fetch.receiving.offer.xfer, fetch.epoch, fetch.page.have, fetch.failures) if fetch else ()

    # Faults

    @property
    def faults(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        """Each with its weight."""
        return [
            (6, self.reset), (5, self.half_open), (4, self.slow_reader), (6, self.flip_on_the_line),
            (3, self.rate_steps), (2, self.far_away), (6, self.flip_in_an_arena), (2, self.restart_d),
            (1, self.restart_p), (3, self.clock_jumps),
        ]  # fmt: skip

    async def reset(self) -> None:
        if pipes := list(self.line.pipes):
            self.line.reset(*self.rng.sample(pipes, self.rng.randint(1, len(pipes))))

    async def half_open(self) -> None:
        trouble = self.line.trouble[self._lane()]
        trouble.swallow = frozenset(self.rng.sample(WAYS, self.rng.randint(1, 2)))
        await asyncio.sleep(self.rng.uniform(0.05, 0.6))
        trouble.swallow = frozenset()

    async def slow_reader(self) -> None:
        gate = self.line.trouble[self._lane()].open[self.rng.choice(WAYS)]
        gate.clear()
        await asyncio.sleep(self.rng.uniform(0.05, 0.6))
        gate.set()

    async def flip_on_the_line(self) -> None:
        lane = self.rng.choice([Lane.BULK, Lane.BULK, Lane.BULK, Lane.CONTROL])
        self.line.trouble[lane].flips["there" if lane is Lane.BULK else self.rng.choice(WAYS)] += 1

    async def rate_steps(self) -> None:
        assert self.line.shaped is not None
        self.line.shaped.set_rate(RATE / 10)
        await asyncio.sleep(self.rng.uniform(0.1, 0.6))
        self.line.shaped.set_rate(RATE)

    async def far_away(self) -> None:
        assert self.line.shaped is not None
        self.line.shaped.set_rtt(0.2)
        await asyncio.sleep(self.rng.uniform(0.2, 0.8))
        self.line.shaped.set_rtt(0.0)

    async def flip_in_an_arena(self) -> None:
        hub = self.rng.choice([self.p, self.d]).site.hub
        written = [page for page in hub.index if page.have]
        if written:
            page = self.rng.choice(written)
            part = self.rng.choice([part for part in range(page.layout.parts) if page.have >> part & 1])
            at = page.offset + part * page.layout.part_bytes + self.rng.randrange(page.layout.part_bytes)
            hub.arena[at] ^= 1 << self.rng.randrange(8)

    async def restart_d(self) -> None:
        await self.d.kill()
        await self.d.start()
        self.line.port = self.d.site.listener.port

    async def restart_p(self) -> None:
        await self.p.kill()
        await self.start_p()

    async def clock_jumps(self) -> None:
        self.rng.choice([self.p, self.d]).clock.ahead += self.rng.uniform(10, 600)

    def _lane(self) -> Lane:
        return self.rng.choice([Lane.BULK, Lane.BULK, Lane.CONTROL])

    async def play(self, faults: int, pause: float) -> None:
        """So many faults at random moments, overlapping, while transfers come and go."""
        weights, kinds = zip(*self.faults, strict=True)
        done, restarting = asyncio.Event(), asyncio.Lock()

        async def fault(kind: Callable[[], Awaitable[None]]) -> None:
            if kind in (self.restart_d, self.restart_p):
                async with restarting:
                    await kind()
            else:
                await kind()

        async def customer(number: int) -> None:
            turn = 0
            while not done.is_set():
                async with restarting:  # while there is a depot
                    pass
                await self.transfer(f"{number}.{turn}")
                turn += 1

        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(customer(number))
            async with asyncio.TaskGroup() as playing:
                for kind in self.rng.choices(kinds, weights, k=faults):
                    playing.create_task(fault(kind))
                    await asyncio.sleep(self.rng.expovariate(1 / pause))
            self.line.heal()
            done.set()

    # What must be as it was

    def leaks(self) -> dict[str, object]:
        """What is held, of every kind."""
        found: dict[str, object] = {}
        for place in (self.p, self.d):
            hub, name = place.site.hub, place.name
            stats = hub.stats()
            hub.index.evict_all(set(SHAPE.layouts))
            hub.settle()
            found |= {
                f"{name} counters": (stats.reserved, stats.pinned, stats.leases, stats.transfers),
                f"{name} owners": (hub.index.owners, dict(hub._opener), dict(hub.index._pins)),
                f"{name} pages": (len(hub.index), hub.index.used_bytes, len(hub.index._allocator._size_at)),
                f"{name} transfers": (dict(hub.senders._by_name), dict(hub.receivers._by_name)),
                f"{name} fetches": (dict(hub.receivers._fetches), dict(hub.inbox._slots), hub.receivers._put_off),
                f"{name} clients": (dict(hub._clients), dict(hub._orphans), len(hub.contracts.declared(""))),
                f"{name} listener": (len(place.site.listener._receivers), place.site.listener.admissions.pending),
            }
        found["connections"] = len(self.line.pipes)
        found["sockets"] = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in _fds())
        found["threads"] = sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
        found["tasks"] = len(asyncio.all_tasks())
        return found

    async def warm(self) -> None:
        """All connections of the link are there."""
        await self.up()
        await until(lambda: len(self.line.pipes) == 1 + CONNECTIONS)
        await until(lambda: len(self.d.site.listener._receivers) == CONNECTIONS)
        await until(lambda: not self.d.site.listener.admissions.pending)

    async def settled(self, start: dict[str, object]) -> None:
        for place in (self.p, self.d):
            await place.forget_former_engines()
        with suppress(AssertionError):  # it would not say what is left
            await until(lambda: self.leaks() == start, 20)
        found = self.leaks()
        left = {what: (start[what], found[what]) for what in found if found[what] != start[what]}
        assert not left, left


def _fds() -> list[int]:
    fds = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # that of the listing
        fds.append(fd)
    return fds
