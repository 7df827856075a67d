"""Turns, pace and estimates on real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from depot_kit import names, produce, until
from link_kit import SHAPE, Site, World

from pdrelay.depot.base import LinkEstimate, Transfer
from pdrelay.depot.metrics import render
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.tcp_lanes import TcpLanes

PACE = 4e6


async def paced(world: World, **route: object) -> tuple[Site, Site]:
    p, d = await world.site("p", 160), await world.site("d", 160)
    p.link("d", f"127.0.0.1:{d.listener.port}", **{"rate": PACE} | route)
    await until(lambda: p.hub.links.up().get("d", False))
    await d.engine("decode")
    return p, d


async def start(p: Site, xfer: str, pages: Sequence[int], *, background: bool = False) -> None:
    p.hub.transfer(Transfer(xfer=xfer, names=names(*pages), to="d", background=background), "gateway")


async def delivered(p: Site, xfer: str) -> None:
    await until(lambda: p.hub.senders.stats(xfer).delivered, 30)


async def test_a_small_delta_passes_a_large_one(world: World) -> None:
    p, _ = await paced(world)
    prefill = await p.engine("prefill")
    await asyncio.to_thread(produce, prefill, "r", names(*range(103)), SHAPE)
    await start(p, "large", range(100))
    await until(lambda: p.hub.senders.stats("large").sent > 0)
    before = p.hub.senders.stats("large").sent
    await start(p, "small", range(100, 103))
    await delivered(p, "small")
    assert p.hub.senders.stats("large").sent - before <= 0.25 * 100 * SHAPE.page_bytes


async def test_fair_shares_the_line(world: World) -> None:
    p, _ = await paced(world, schedule="fair")
    prefill = await p.engine("prefill")
    await asyncio.to_thread(produce, prefill, "r", names(*range(80)), SHAPE)
    await start(p, "a", range(40))
    await start(p, "b", range(40, 80))
    sent = lambda xfer: p.hub.senders.stats(xfer).sent // SHAPE.page_bytes  # noqa: E731
    await until(lambda: sent("a") >= 20)
    assert sent("b") >= 12
    await delivered(p, "a")
    assert sent("b") >= 30


async def test_background_yields_at_once(world: World) -> None:
    p, _ = await paced(world)
    prefill = await p.engine("prefill")
    await asyncio.to_thread(produce, prefill, "r", names(*range(80)), SHAPE)
    await start(p, "parity", range(50), background=True)
    await until(lambda: p.hub.senders.stats("parity").sent > 0)
    before = p.hub.senders.stats("parity").sent
    await start(p, "live", range(50, 80))
    await delivered(p, "live")
    # What had begun: a batch on each connection and what was under way.
    assert p.hub.senders.stats("parity").sent - before <= 8 * SHAPE.page_bytes


async def test_a_transfer_keeps_to_its_share_of_the_connections(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    put, most = TcpLanes.put, 0

    def watched(lanes: TcpLanes, batch: FlyingBatch) -> None:
        nonlocal most
        put(lanes, batch)
        carried = [{flying.xfer for flying in lane.unacked.values()} for lane in lanes._lanes.values()]
        assert all(len(xfers) <= 1 for xfers in carried)
        assert sum(batch.xfer in xfers for xfers in carried) == 1
        most = max(most, sum(map(len, carried)))

    monkeypatch.setattr(TcpLanes, "put", watched)
    p, _ = await paced(world, connections=3, per_transfer=1, rate=20e6)
    prefill = await p.engine("prefill")
    await asyncio.to_thread(produce, prefill, "r", names(*range(80)), SHAPE)
    for number in range(4):
        await start(p, f"x{number}", range(20 * number, 20 * number + 20))
    for number in range(4):
        await delivered(p, f"x{number}")
    assert most > 1


async def test_the_line_is_measured_and_told(world: World) -> None:
    p, _ = await paced(world, rate=None)
    told: list[LinkEstimate] = []
    p.hub.subscribe(lambda event: told.append(event) if isinstance(event, LinkEstimate) else None)
    prefill = await p.engine("prefill")
    await asyncio.to_thread(produce, prefill, "r", names(*range(100)), SHAPE)
    await start(p, "x", range(100))
    await delivered(p, "x")
    await until(lambda: bool(told) and told[-1].lanes == 2 and told[-1].queued == 0)
    assert 0 < told[-1].base_rtt <= told[-1].rtt
    assert told[-1].tcp_rtt > 0
    assert p.hub.links.estimates["d"] == told[-1]
    lines = render(p.hub).splitlines()
    assert 'pdrelay_depot_link_connections{depot="p",to="d"} 2' in lines
    assert 'pdrelay_depot_link_queued_bytes{depot="p",to="d",class="live"} 0' in lines
