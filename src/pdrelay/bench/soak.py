"""Many transfers, one after another and several at once: the memory of both depots must stay what it was.

Besides transfers that are delivered there are those that a gateway gives up half-way and those that it demotes; the
arenas are so small that pages are evicted all the time. Anonymous memory is what Python and its libraries hold; the
arena is shared memory, which grows to its budget and no further.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdrelay.bench import fleet
from pdrelay.bench.producer import fresh_names
from pdrelay.bench.settings import Place, Progress, Shape
from pdrelay.bench.stats import Estimate, Floats, estimate
from pdrelay.cluster.ports import free_addresses
from pdrelay.depot.base import DepotStats, Transfer
from pdrelay.errors import BenchError

AT_ONCE = 8
PAGES = 4
SHAPE = Shape(part_bytes=8 << 10, parts=4)
ARENA = 256 * SHAPE.page_bytes
SAMPLES = 100
WARM_UP = 0.25
"""Share of the samples, the first ones, in which caches and buffers find their size."""
LIMIT = 32.0
"""Bytes that a transfer may leave behind: fewer than the smallest object that could be forgotten."""
GIVEN_UP, DEMOTED = 7, 11
"""Every so manieth transfer is given up half-way, demoted."""
DEADLINE = 60.0


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one depot's process."""

    anonymous: int  # what it alone holds, without the arena
    resident: int  # all that is in memory, the arena included


class Sample(msgspec.Struct, frozen=True):
    """Memory after so many transfers."""

    transfers: int
    sender: Memory
    receiver: Memory


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the memory. Slopes are bytes of anonymous memory a transfer."""

    transfers: int
    seconds: float
    samples: list[Sample]
    sender: Estimate
    receiver: Estimate
    limit: float
    left_behind: dict[str, int]  # counters of the depots that are not back at 0
    flat: bool


def memory_of(pid: int) -> Memory:
    """From /proc/PID/smaps_rollup. Raises BenchError when the process is gone."""
    try:
        rows = (row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    except OSError as error:
        raise BenchError(f"process {pid}: no memory figures: {error.strerror}") from error
    found = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    return Memory(found["Pss_Anon"], found["Rss"])


async def soak(transfers: int, place: Place, progress: Progress) -> Soak:
    """Runs `transfers` transfers between two depots of this machine. Raises BenchError when one fails."""
    sender, receiver = free_addresses(2)
    route = fleet.Route(sender, receiver, receiver, receiver)
    async with fleet.running("soak", place, route, fleet.LinkOptions(), SHAPE.contract, ARENA) as depots:
        load = Load(depots, transfers, progress)
        start = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(load.work())
        except* (OSError, TimeoutError) as errors:
            first = errors.exceptions[0]
            raise BenchError(f"a transfer failed: {type(first).__name__}: {first}") from first
        seconds = time.monotonic() - start
        left = await _left_behind(depots)
    slopes = {side: slope_of(load.samples, side) for side in ("sender", "receiver")}
    return Soak(
        transfers=transfers, seconds=seconds, samples=load.samples, limit=LIMIT, left_behind=left,
        flat=not left and all(slope.value <= LIMIT for slope in slopes.values()), **slopes,
    )  # fmt: skip


def slope_of(samples: list[Sample], side: str) -> Estimate:
    """Growth of anonymous memory a transfer, after the warm-up."""
    rest = samples[int(len(samples) * WARM_UP) :]
    anonymous = [float(getattr(sample, side).anonymous) for sample in rest]
    return estimate(_slope, [float(sample.transfers) for sample in rest], anonymous, block=5)


def _slope(x: Floats, y: Floats) -> Any:
    """Median slope between any two samples (Theil and Sen): one step, as when the C library maps another heap for a
    thread, is no growth."""
    dx, dy = x[..., :, None] - x[..., None, :], y[..., :, None] - y[..., None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nanmedian(np.where(dx > 0, dy / dx, np.nan), axis=(-2, -1))


class Load:
    """The transfers, and what memory was meanwhile."""

    def __init__(self, depots: fleet.Fleet, transfers: int, progress: Progress) -> None:
        self._depots, self._transfers, self._progress = depots, transfers, progress
        self._numbers: Iterator[int] = itertools.count(1)
        self._every = max(1, transfers // SAMPLES)
        self._done = 0
        self.samples: list[Sample] = []

    async def work(self) -> None:
        """One after another until all are done."""
        while (number := next(self._numbers)) <= self._transfers:
            async with asyncio.timeout(DEADLINE):
                await self.one(number)
            self._done += 1
            if self._done % self._every == 0:
                self._progress(f"{self._done} of {self._transfers} transfers")
                sender, receiver = (memory_of(site.process.pid) for site in self._depots)
                self.samples.append(Sample(self._done, sender, receiver))

    async def one(self, number: int) -> None:
        """Transfer `number`: delivered, given up before its pages exist, or demoted."""
        sender, receiver = self._depots
        names, owner = fresh_names(PAGES), f"soak-{number}"
        await sender.control.transfer(Transfer(xfer=owner, names=names, to=receiver.control.depot))
        if number % GIVEN_UP:
            await asyncio.to_thread(sender.engine.publish, owner, names)
            if number % DEMOTED == 0:
                await sender.control.demote(owner)
            await receiver.control.wait(names)
            await asyncio.to_thread(sender.engine.release, owner)
        await sender.control.end(owner)


async def _left_behind(depots: fleet.Fleet) -> dict[str, int]:
    """Counters that stay above 0 after all has ended."""
    left: dict[str, int] = {}
    for site in depots:
        stats = await _settled(site)
        counts = {"leases": stats.leases, "reserved": stats.reserved, "pinned": stats.pinned}
        counts["transfers"] = stats.transfers
        left |= {f"{site.control.depot} {name}": count for name, count in counts.items() if count}
    return left


async def _settled(site: fleet.Site) -> DepotStats:
    deadline = time.monotonic() + DEADLINE
    while True:
        stats = await site.control.stats()
        if not (stats.leases or stats.reserved or stats.transfers) or time.monotonic() > deadline:
            return stats
        await asyncio.sleep(0.1)
