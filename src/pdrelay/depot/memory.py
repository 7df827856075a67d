"""In-memory twins: a depot without sockets, for tests of engines and gateway. The same hub, reached by plain calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from pdrelay.depot.base import (
    DepotEvent,
    DepotStats,
    Leases,
    PageKind,
    Part,
    Progress,
    Transfer,
    TransferStats,
    Use,
)
from pdrelay.depot.hub import Hub
from pdrelay.depot.memory_disk import MemoryDisk
from pdrelay.depot.memory_link import MemoryLink, link
from pdrelay.errors import DepotUnavailableError
from pdrelay.kv.contract import KVContract


class MemoryDepot:
    """A depot of `capacity` bytes. All calls are under one lock, so engines may use it from any thread."""

    def __init__(
        self,
        name: str = "depot",
        capacity: int = 1 << 20,
        fleet_key: bytes = b"k" * 32,
        clock: Callable[[], float] = time.monotonic,
        disk: MemoryDisk | None = None,
    ) -> None:
        self.arena = memoryview(bytearray(capacity))
        self.disk = disk if disk is not None else MemoryDisk(0)
        self.hub = Hub(name, self.arena, fleet_key, clock, disk=self.disk)
        self.lock = threading.RLock()
        self.alive = True
        self.links: list[MemoryLink] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Owns the hub; what its links carry moves before the turn ends."""
        with self.lock:
            yield
            self._move()

    def _move(self) -> None:
        disks = {id(end): end.disk for link in self.links for end in (link.source, link.target)} | {id(self): self.disk}
        moved = True
        while moved:
            for carried in self.links:
                carried.move()
            moved = any(disk.step() for disk in disks.values() if not disk.stepped)

    def engine(self, instance: str, contract: KVContract) -> MemoryEngineDepot:
        """A connection of an engine. Raises ContractError."""
        return MemoryEngineDepot(self, instance, contract)

    def control(self) -> MemoryDepotControl:
        """A connection of a gateway."""
        return MemoryDepotControl(self)

    def tick(self) -> None:
        """Lets time-outs happen; the clock is the constructor's."""
        with self.turn():
            self.hub.tick()

    def die(self) -> None:
        """From now on every call raises DepotUnavailableError."""
        self.alive = False

    def require_alive(self) -> None:
        """Raises DepotUnavailableError after `die`."""
        if not self.alive:
            raise DepotUnavailableError(f"depot {self.hub.name} is gone")


class MemoryEngineDepot:
    """EngineDepot on a MemoryDepot."""

    def __init__(self, depot: MemoryDepot, instance: str, contract: KVContract) -> None:
        depot.require_alive()
        self._depot, self._instance, self._contract = depot, instance, contract
        with depot.turn():
            self._connection: int | None = depot.hub.engine_joins(instance, contract)

    @property
    def arena(self) -> memoryview:
        """The writable shared arena."""
        return self._depot.arena

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        return self._depot.hub.fleet_key

    @property
    def epoch(self) -> str:
        """See EngineDepot."""
        return self._depot.hub.epoch

    @property
    def depot(self) -> str:
        """The depot's name."""
        return self._depot.hub.name

    def match(self, names: Sequence[bytes]) -> int:
        """See EngineDepot."""
        with self._depot.turn():
            return self._hub().match(names)

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """See EngineDepot."""
        with self._depot.turn():
            return self._hub().holds(names)

    def lease(self, owner: str, names: Sequence[bytes]) -> Leases:
        """See EngineDepot."""
        with self._depot.turn():
            return self._hub().lease(self._id(), self._owner(owner), names)

    def corrupt(self, owner: str, names: Sequence[bytes]) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            self._hub().corrupt(self._owner(owner), names)

    def reserve(self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind]) -> list[int | None]:
        """See EngineDepot."""
        with self._depot.turn():
            return self._hub().reserve(self._id(), self._owner(owner), names, kinds, self._contract)

    def publish(self, owner: str, parts: Sequence[Part]) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            self._hub().publish(self._owner(owner), parts)

    def release(self, owner: str) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            self._hub().release(self._owner(owner))

    def report_held(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            self._hub().report_held(self._instance, self._id(), added, removed)

    def report_use(self, use: Use) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            self._hub().report_use(self._instance, use)

    def close(self) -> None:
        """See EngineDepot."""
        with self._depot.turn():
            connection, self._connection = self._connection, None
            if connection is not None:
                self._depot.hub.engine_leaves(self._instance, connection)

    def _hub(self) -> Hub:
        self._depot.require_alive()
        self._id()
        return self._depot.hub

    def _id(self) -> int:
        if self._connection is None:
            raise DepotUnavailableError("the connection is closed")
        return self._connection

    def _owner(self, owner: str) -> str:
        return f"{self._instance}/{owner}"


class MemoryDepotControl:
    """DepotControl on a MemoryDepot. Use it from one event loop; engines may be on other threads."""

    def __init__(self, depot: MemoryDepot) -> None:
        self._depot, self._client = depot, uuid4().hex
        self._closed = False
        with depot.turn():
            depot.hub.client_joins(self._client)

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        return self._depot.hub.fleet_key

    @property
    def depot(self) -> str:
        """The depot's name."""
        return self._depot.hub.name

    @property
    def trouble(self) -> str:
        """See DepotControl."""
        try:
            self._hub()
        except DepotUnavailableError as error:
            return str(error)
        return ""

    async def ready(self, timeout: float) -> None:
        """Raises DepotUnavailableError when the depot is gone."""
        self._hub()

    async def wait(self, names: Sequence[bytes], engine: str = "") -> None:
        """See DepotControl."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        with self._depot.turn():
            waiter = self._hub().wait(list(names), engine, lambda: _on_loop(loop, ready.set))
        try:
            await ready.wait()
        finally:
            with self._depot.turn():
                self._depot.hub.waiters.cancel(waiter)

    async def transfer(self, transfer: Transfer) -> None:
        """See DepotControl."""
        with self._depot.turn():
            self._hub().transfer(transfer, self._client)

    async def demote(self, xfer: str) -> None:
        """See DepotControl."""
        with self._depot.turn():
            self._hub().demote(xfer)

    async def end(self, xfer: str) -> TransferStats:
        """See DepotControl."""
        with self._depot.turn():
            return self._hub().end(xfer)

    async def transfer_stats(self, xfer: str) -> TransferStats:
        """See DepotControl."""
        with self._depot.turn():
            return self._hub().senders.stats(xfer)

    async def progress(self) -> list[Progress]:
        """See DepotControl."""
        with self._depot.turn():
            return self._hub().progress()

    async def stats(self) -> DepotStats:
        """See DepotControl."""
        with self._depot.turn():
            return self._hub().stats()

    async def events(self) -> AsyncIterator[DepotEvent]:
        """See DepotControl."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[DepotEvent] = asyncio.Queue()
        with self._depot.turn():
            stream = self._hub().subscribe(lambda event: _on_loop(loop, lambda: queue.put_nowait(event)))
        try:
            while True:
                yield await queue.get()
        finally:
            with self._depot.turn():
                self._depot.hub.unsubscribe(stream)

    async def aclose(self) -> None:
        """See DepotControl."""
        if not self._closed:
            self._closed = True
            with self._depot.turn():
                self._depot.hub.client_leaves(self._client, for_good=True)

    def _hub(self) -> Hub:
        self._depot.require_alive()
        if self._closed:
            raise DepotUnavailableError("the connection is closed")
        return self._depot.hub


def _on_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(action)


__all__ = ["MemoryDepot", "MemoryDepotControl", "MemoryDisk", "MemoryEngineDepot", "MemoryLink", "link"]
