"""A line of a set rate between two depots: how much of it the link fills, beside iperf3 on the same line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import msgspec

from pdrelay.bench import fleet
from pdrelay.bench.contestants import Contestant, OurLink, Peer
from pdrelay.bench.line import ShapedLine, opened
from pdrelay.bench.settings import Kind, Place, Progress, Settings
from pdrelay.bench.throughput import Entry, Row, compare, ready
from pdrelay.bench.unshaped import arena_for
from pdrelay.cluster.units import parse_address, parse_rate, parse_time

YARDSTICK = "iperf3"


class Shaped(msgspec.Struct, frozen=True, kw_only=True):
    """The line, and how much of it each got."""

    line: Kind
    rate: float  # bytes per second
    rtt: float
    note: str
    connections: int
    bytes: int
    rounds: int
    rows: list[Row]


async def shaped(settings: Settings, place: Place, progress: Progress) -> Shaped:
    """Raises BenchError when there is no line."""
    rate, rtt = parse_rate(settings.line_rate), parse_time(settings.line_rtt)
    pages = settings.shape.pages(int(rate * settings.line_seconds))
    size = pages * settings.shape.page_bytes
    async with opened(settings.line, rate, rtt, place.home) as line:
        entries = [
            Entry(YARDSTICK, partial(_iperf3, settings, line, size), ""),
            Entry("pdrelay, TLS", partial(_our_link, "tls", settings, place, line, pages, "tls"), YARDSTICK),
        ]
        rows = await compare(entries, settings.rounds, progress)
        return Shaped(
            line=line.kind, rate=rate, rtt=rtt, note=line.note, connections=settings.connections, bytes=size,
            rounds=settings.rounds, rows=rows,
        )  # fmt: skip


def _iperf3(settings: Settings, line: ShapedLine, size: int) -> AbstractAsyncContextManager[Contestant]:
    where = ["--listen", str(parse_address(line.other.listen)[1]), "--address", line.other.dial]
    if line.sender_namespace is not None and line.receiver_namespace is not None:
        where += ["--sender-namespace", line.sender_namespace, "--receiver-namespace", line.receiver_namespace]
    return ready(Peer(settings.peers / f"{YARDSTICK}.py", settings.connections, settings.chunk, size, *where))


@asynccontextmanager
async def _our_link(
    name: str, settings: Settings, place: Place, line: ShapedLine, pages: int, encryption: fleet.Encryption
) -> AsyncIterator[Contestant]:
    shape = settings.shape
    options = fleet.LinkOptions(
        connections=settings.connections, rate=settings.line_rate, rtt=settings.line_rtt, encryption=encryption
    )
    async with fleet.running(name, place, line.route, options, shape.contract, arena_for(settings, pages)) as depots:
        yield OurLink(depots, pages, shape.page_bytes)
