"""One line between two depots on this machine without a limit: what a transfer costs in time and CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.util import find_spec

import msgspec

from pdrelay.bench import fleet
from pdrelay.bench.contestants import Contestant, MissingPeerError, OurLink, Peer, bare_loop
from pdrelay.bench.settings import Place, Progress, Settings
from pdrelay.bench.throughput import Entry, Row, compare, ready
from pdrelay.cluster.ports import free_addresses
from pdrelay.depot.nixl.agent import BUILDS

PEERS = ("iperf3", "nixl", "mooncake")
"""Names of the peers' scripts."""

UNLIMITED = "400gbit"
"""A link never sends faster than it is told to: here no line limits it."""

ARENA_ROUNDS = 1.25
"""Arena per payload of a measurement: the next one's pages evict the last one's."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What was moved, and how fast by whom."""

    connections: int
    bytes: int
    rounds: int
    rows: list[Row]


async def throughput(settings: Settings, place: Place, progress: Progress) -> Throughput:
    """Our link, plain and with TLS, beside the bare loop and the peers."""
    size = settings.shape.pages(settings.size) * settings.shape.page_bytes
    loop = partial(bare_loop, connections=settings.connections, chunk=settings.chunk, size=size, logs=place.home)
    clear, tls = fleet.LinkOptions(encryption="control"), fleet.LinkOptions()
    entries = [
        Entry(
            "pdrelay, plain",
            partial(_our_link, "plain", settings, place, clear),
            "bare loop, plain",
        ),
        Entry("bare loop, plain", partial(loop, "bare-plain", memory=size, tls=None), ""),
        Entry(
            "bare loop through one buffer, plain", partial(loop, "hot-plain", memory=0, tls=None), "bare loop, plain"
        ),
        Entry("pdrelay, TLS", partial(_our_link, "tls", settings, place, tls), "bare loop, TLS"),
        Entry("bare loop, TLS", partial(loop, "bare-tls", memory=size, tls=place.certificates), ""),
        Entry(
            "bare loop through one buffer, TLS",
            partial(loop, "hot-tls", memory=0, tls=place.certificates),
            "bare loop, TLS",
        ),
        Entry("pdrelay over NIXL", partial(_our_link_over_nixl, settings, place), "nixl"),
        *(Entry(name, partial(_peer, settings, name, size), "bare loop, plain") for name in PEERS),
    ]
    rows = await compare(entries, settings.rounds, progress)
    return Throughput(connections=settings.connections, bytes=size, rounds=settings.rounds, rows=rows)


def _peer(settings: Settings, name: str, size: int) -> AbstractAsyncContextManager[Contestant]:
    return ready(Peer(settings.peers / f"{name}.py", settings.connections, settings.chunk, size))


def _our_link_over_nixl(settings: Settings, place: Place) -> AbstractAsyncContextManager[Contestant]:
    if not any(map(find_spec, BUILDS)):
        raise MissingPeerError("NIXL is not installed: pip install 'pdrelay[nixl]'")
    return _our_link("over-nixl", settings, place, fleet.LinkOptions(transport="nixl"))


@asynccontextmanager
async def _our_link(
    name: str, settings: Settings, place: Place, options: fleet.LinkOptions
) -> AsyncIterator[Contestant]:
    shape, pages = settings.shape, settings.shape.pages(settings.size)
    sender, receiver = free_addresses(2)
    route = fleet.Route(sender, receiver, receiver, receiver)
    arena = arena_for(settings, pages)
    options = options._replace(connections=settings.connections, rate=UNLIMITED)
    async with fleet.running(name, place, route, options, shape.contract, arena) as depots:
        yield OurLink(depots, pages, shape.page_bytes)


def arena_for(settings: Settings, pages: int) -> int:
    """Bytes of an arena for measurements of so many pages."""
    return int(pages * settings.shape.page_bytes * ARENA_ROUNDS) + settings.shape.page_bytes
