"""An open load of transfers on the link between two depots: arrivals do not wait for what came before them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from pdrelay.bench.fleet import Fleet
from pdrelay.bench.producer import fresh_names
from pdrelay.bench.settings import Progress
from pdrelay.bench.table2 import Moments
from pdrelay.depot.base import Transfer
from pdrelay.errors import BenchError, PdrelayError

AHEAD_SECONDS = 0.5
"""Pages are published so long before their transfer: the producer's own time is not the link's."""
DRAIN_SECONDS = 120.0
"""After the last arrival; what is not there by then has failed."""

_numbers = count()


class Work(NamedTuple):
    """Transfers: when each arrives, in seconds from the start, rising, and how many pages it has."""

    arrivals: Sequence[float]
    pages: Sequence[int]


async def through_link(depots: Fleet, work: Work, progress: Progress) -> Moments:
    """Does the work. `began` is when the first page was there. Raises BenchError when a transfer fails."""
    start = time.monotonic() + AHEAD_SECONDS
    requests = [
        _Request(depots, start + arrival, fresh_names(pages))
        for arrival, pages in zip(work.arrivals, work.pages, strict=True)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_publish(depots, requests))
            for done, request in enumerate(requests):
                await asyncio.sleep(request.arrives - time.monotonic())
                group.create_task(request.run())
                progress(f"{done + 1} of {len(requests)} transfers under way or done")
    except* (PdrelayError, TimeoutError, OSError) as errors:
        first = errors.exceptions[0]
        raise BenchError(f"a transfer failed: {type(first).__name__}: {first}") from first
    return Moments(
        [request.arrives for request in requests], [request.began for request in requests],
        [request.ended for request in requests],
    )  # fmt: skip


class _Request:
    """One transfer."""

    def __init__(self, depots: Fleet, arrives: float, names: list[bytes]) -> None:
        self._depots, self.arrives, self.names = depots, arrives, names
        self.owner = f"request-{next(_numbers)}"
        self.published = asyncio.Event()
        self.began = self.ended = 0.0

    async def run(self) -> None:
        """From the gateway's call until the last page is there. A late producer counts against us."""
        sender, receiver = self._depots.sender, self._depots.receiver.control
        async with asyncio.timeout(DRAIN_SECONDS):
            await self.published.wait()
            await sender.control.transfer(Transfer(xfer=self.owner, names=self.names, to=receiver.depot))
            first = asyncio.create_task(self._first_page())
            try:
                await receiver.wait(self.names)
                self.ended = time.monotonic()
                await first
            finally:
                first.cancel()
            await sender.control.end(self.owner)
        await asyncio.to_thread(sender.engine.release, self.owner)

    async def _first_page(self) -> None:
        await self._depots.receiver.control.wait(self.names[:1])
        self.began = time.monotonic()


async def _publish(depots: Fleet, requests: Sequence[_Request]) -> None:
    for request in requests:
        await asyncio.sleep(request.arrives - AHEAD_SECONDS - time.monotonic())
        await asyncio.to_thread(depots.sender.engine.publish, request.owner, request.names)
        request.published.set()
