"""The emulated engine's way to its host's depot: the blocking seam made asynchronous, connected again when lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pdrelay.depot.base import EngineDepot, Leased, Leases, PageKind, Part, Use
from pdrelay.errors import ArenaFullError, DepotUnavailableError, EngineRejectedError

_log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 0.05
"""How long a reservation waits before it tries again for room in the arena, and a lease for pages from disk."""

RECALL_SECONDS = 5.0
"""What has not come back from disk by then is computed."""


class DepotConnection:
    """One connection. Calls run in threads, so that a slow depot does not stop the engine's loop.

    INV-EMU-2: a cancelled call is awaited to its end before the cancellation goes on, so what it took can be released.
    """

    def __init__(self, depot: EngineDepot) -> None:
        self.depot = depot
        self.lost = False

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        return self.depot.fleet_key

    @property
    def arena(self) -> memoryview:
        """The shared arena. Offsets are good only in the arena of the connection that gave them."""
        return self.depot.arena

    async def lease(self, owner: str, names: Sequence[bytes]) -> Leases:
        """See EngineDepot."""
        return await self._call(lambda: self.depot.lease(owner, names))

    async def corrupt(self, owner: str, names: Sequence[bytes]) -> None:
        """See EngineDepot."""
        await self._call(lambda: self.depot.corrupt(owner, names))

    async def lease_patiently(self, owner: str, names: Sequence[bytes]) -> list[Leased]:
        """As `lease`, but waits a while for pages that come back from disk."""
        deadline = time.monotonic() + RECALL_SECONDS
        while (leases := await self.lease(owner, names)).coming and time.monotonic() < deadline:
            await self.release(owner)  # nobody waits for room while holding some
            await asyncio.sleep(RETRY_SECONDS)
        return leases.pages

    async def reserve(self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind]) -> list[int | None]:
        """See EngineDepot."""
        return await self._call(lambda: self.depot.reserve(owner, names, kinds))

    async def reserve_patiently(
        self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind]
    ) -> list[int | None]:
        """As `reserve`, but waits while the arena is full. Raises EngineRejectedError when it is too small for ever."""
        while True:
            try:
                return await self.reserve(owner, names, kinds)
            except ArenaFullError as error:
                if error.hopeless:
                    raise EngineRejectedError(f"the prompt's KV does not fit into the depot: {error}") from error
            await asyncio.sleep(RETRY_SECONDS)

    async def release(self, owner: str) -> None:
        """See EngineDepot. A depot that is gone holds nothing any more."""
        with contextlib.suppress(DepotUnavailableError):
            await self._call(lambda: self.depot.release(owner))

    async def check(self) -> None:
        """Notices that the depot is gone."""
        with contextlib.suppress(DepotUnavailableError):
            await self._call(lambda: self.depot.match([]))

    def publish(self, owner: str, parts: Sequence[Part]) -> None:
        """See EngineDepot."""
        with self._watched():
            self.depot.publish(owner, parts)

    def report_held(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineDepot. A depot that is gone is told all when it is back."""
        with contextlib.suppress(DepotUnavailableError), self._watched():
            self.depot.report_held(added, removed)

    def report_use(self, use: Use) -> None:
        """See EngineDepot."""
        with contextlib.suppress(DepotUnavailableError), self._watched():
            self.depot.report_use(use)

    async def _call(self, call: Callable[[], T]) -> T:
        with self._watched():
            return await unhurried(call)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except DepotUnavailableError:
            self.lost = True
            raise


class HostDepot:
    """The host's depot, over one connection after the other: `first`, then those that `connect` makes."""

    def __init__(self, first: EngineDepot, connect: Callable[[], EngineDepot]) -> None:
        self._connect = connect
        self._connection = DepotConnection(first)
        self._reconnecting = asyncio.Lock()
        self._held: dict[bytes, None] = {}

    async def connection(self) -> DepotConnection:
        """The present connection, a new one when the last was lost. Raises DepotUnavailableError."""
        async with self._reconnecting:
            await self._connection.check()  # or the first request after a restart of the depot would fail
            if self._connection.lost:
                depot = await unhurried(self._connect)
                self._connection.depot.close()
                self._connection = DepotConnection(depot)
                self._connection.report_held(list(self._held), [])
                _log.warning("connected to the depot again")
            return self._connection

    def report_held(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tells the depot which pages entered and left the engine's cache; a depot that comes back is told all."""
        self._held.update(dict.fromkeys(added))
        for name in removed:
            del self._held[name]
        self._connection.report_held(added, removed)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.depot.close()


async def unhurried(call: Callable[[], T]) -> T:
    """Runs a blocking call in a thread; when cancelled, waits for its end all the same."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
