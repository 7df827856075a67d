"""Runs PDD's Table 2 on a shaped line: every carrier gets the same transfers at the same moments."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdrelay.bench import fleet, pool
from pdrelay.bench.line import ShapedLine, opened
from pdrelay.bench.load import Work, through_link
from pdrelay.bench.settings import Carrier, Place, Progress, Settings
from pdrelay.bench.table2 import (
    CONNECTION_RATE,
    DISTRIBUTIONS,
    LINE_RATE,
    PAYLOAD_SHARE,
    POOL,
    PROMPT_PAGES,
    Arm,
    Load,
    Moments,
    Table2,
    arm_of,
    checks_of,
    load_of,
)
from pdrelay.bench.table2_text import explain
from pdrelay.cluster.units import parse_address, parse_time
from pdrelay.errors import PdrelayError
from pdrelay.workload.hit_rates import Name

ARENA = 256 << 20
SAMPLE_SECONDS = 0.05
IDLE, IDLE_GAP = 20, 0.05
"""Transfers, and seconds between them, that find the line idle."""


async def table2(settings: Settings, place: Place, progress: Progress) -> Table2:
    """Runs all arms. Raises BenchError when there is no line; an arm that fails is told in the result."""
    rate = LINE_RATE / settings.scale
    load = load_of(settings.scale, settings.duration, settings.seed)
    arms: list[Arm] = []
    failures: dict[str, str] = {}
    async with opened(settings.line, rate / settings.slower, parse_time(settings.line_rtt), place.home) as line:
        for name in DISTRIBUTIONS:
            for carrier in settings.carriers:
                label = f"{carrier}, {name}"
                try:
                    arms.append(await _arm(settings, place, line, load, carrier, name, progress))
                except (PdrelayError, OSError, TimeoutError) as error:
                    failures[label] = str(error) or type(error).__name__
    sizes = {name: load.sizes(name) for name in DISTRIBUTIONS}
    return Table2(
        scale=settings.scale, slower=settings.slower, line=line.kind, note=line.note, rate=rate,
        rtt=line.rtt / settings.slower, duration=settings.duration,
        seed=settings.seed, prompt_bytes=load.page_bytes * PROMPT_PAGES,
        mean_bytes={name: float(np.mean(sizes[name])) for name in DISTRIBUTIONS},
        offered_load={name: sum(sizes[name]) / settings.duration / rate for name in DISTRIBUTIONS},
        arms=arms, checks=list(checks_of(arms)), failures=failures,
        explanation=explain(arms, load, rate * PAYLOAD_SHARE[line.kind], settings.scale),
    )  # fmt: skip


async def _arm(
    settings: Settings, place: Place, line: ShapedLine, load: Load, carrier: Carrier, name: Name, progress: Progress
) -> Arm:
    slower = settings.slower
    rate, arrivals = line.rate * slower, [moment * slower for moment in load.arrivals]
    if carrier == "pool":
        progress(f"{name} deltas, a pool of connections")
        async with pool.connected(line, POOL, CONNECTION_RATE / settings.scale / slower, place.home) as connections:
            moments = await connections.run(arrivals, load.sizes(name))
        used = moments.under_way(*_second_half(moments)) / POOL
        return arm_of(carrier, name, load, moments.faster(slower), rate, POOL, used)
    options = fleet.LinkOptions(
        connections=settings.connections, rate=f"{line.rate * 8:.0f}bit", rtt=settings.line_rtt,
        schedule="srpt" if carrier == "link-srpt" else "fair",
    )  # fmt: skip
    home = f"{name}-{options.schedule}"

    def tell(news: str) -> None:
        progress(f"{name} deltas, {carrier}: {news}")

    async with fleet.running(home, place, line.route, options, load.contract, ARENA) as depots:
        pages = round(float(np.median(load.pages[name])))
        idle = await through_link(depots, Work([IDLE_GAP * number for number in range(IDLE)], [pages] * IDLE), tell)
        async with _busy_connections(depots.sender.process.pid, line.route.bulk) as samples:
            before, begun = [site.process.core_times() for site in depots], time.monotonic()
            moments = await through_link(depots, Work(arrivals, load.pages[name]), tell)
            after, seconds = [site.process.core_times() for site in depots], time.monotonic() - begun
    start, end = _second_half(moments)
    busy = [sample.busy for sample in samples if start <= sample.moment <= end]
    used = min(1.0, float(np.mean(busy)) / options.connections) if busy else 0.0
    idle_p50 = float(np.median(np.subtract(idle.ended, idle.arrived))) / slower
    core_wait = sum(now.waited - then.waited for now, then in zip(after, before, strict=True)) / seconds
    return arm_of(carrier, name, load, moments.faster(slower), rate, options.connections, used, idle_p50, core_wait)


def _second_half(moments: Moments) -> tuple[float, float]:
    """When the line is as full as it gets: the large deltas of a slow connection need long to be many."""
    first, last = moments.arrived[0], moments.arrived[-1]
    return (first + last) / 2, last


class _Sample(NamedTuple):
    moment: float
    busy: int


@asynccontextmanager
async def _busy_connections(pid: int, address: str) -> AsyncIterator[list[_Sample]]:
    """How many connections of the namespace of process `pid` to `address` have unacknowledged bytes, sampled."""
    host, port = parse_address(address)
    remote = f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"
    samples: list[_Sample] = []

    async def sample() -> None:
        while True:
            samples.append(_Sample(time.monotonic(), _busy(Path(f"/proc/{pid}/net/tcp"), remote)))
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await task


def _busy(table: Path, remote: str) -> int:
    rows = (row.split() for row in table.read_text().splitlines()[1:])
    return sum(row[2] == remote and int(row[4].partition(":")[0], 16) > 0 for row in rows)
