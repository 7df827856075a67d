"""Bulk connections in clear, padding that warms connections, progress, and what a resumed transfer costs."""

from __future__ import annotations

import asyncio

import pytest
from depot_kit import content, intact, names, produce, until
from link_kit import SHAPE, Line, Site, World

from pdrelay.depot.base import LinkState, Progress, Transfer
from pdrelay.depot.tcp_lanes import TcpLanes

PAGES = names(*range(40))
SIZE = 40 * SHAPE.page_bytes
PART = content(PAGES[7], 1, SHAPE.groups[0].part_bytes)[1000:1200]
"""Bytes of some part."""


async def joined(world: World, encryption: str, **route: object) -> tuple[Site, Site, Line]:
    p = await world.site("p")
    d = await world.site("d", clear=["p"] if encryption == "control" else [])
    line = await world.line(d)
    line.watched_for = (PART,)
    p.link("d", f"127.0.0.1:{d.listener.port}", line.address, **{"encryption": encryption} | route)
    await until(lambda: p.hub.links.up().get("d", False))
    return p, d, line


async def send(p: Site, d: Site) -> None:
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    await asyncio.to_thread(produce, prefill, "r", PAGES, SHAPE)
    p.hub.transfer(Transfer(xfer="x", names=PAGES, to="d"), "gateway")
    await until(lambda: p.hub.senders.stats("x").delivered, 30)
    assert await asyncio.to_thread(intact, decode, "r", PAGES, SHAPE)
    await asyncio.to_thread(decode.release, "r")


@pytest.mark.parametrize(("encryption", "readable"), [("tls", False), ("control", True)])
async def test_kv_crosses_the_line_as_the_link_says(world: World, encryption: str, readable: bool) -> None:
    p, d, line = await joined(world, encryption)
    await send(p, d)
    assert (PART in line.seen) is readable
    assert p.hub.links.paths() == {"d": "tcp" if encryption == "tls" else "tcp in clear"}
    p.hub.end("x")
    await until(lambda: p.idle() and d.idle())


@pytest.mark.parametrize("after", [200, 300_000, 1_000_001])
async def test_what_is_changed_on_the_way_in_clear_is_sent_again(world: World, after: int) -> None:
    p, d, line = await joined(world, "control")
    line.flip_after = after
    await send(p, d)
    assert line.flip_after is None


async def test_a_broken_connection_in_clear_gets_a_secret_of_its_own(world: World) -> None:
    p, d, line = await joined(world, "control")
    line.cut_after = 1_000_000
    await send(p, d)
    assert line.cut_after is None
    assert p.hub.links.up() == {"d": True}


@pytest.mark.parametrize(("here", "there"), [("tls", ["p"]), ("control", [])])
async def test_both_ends_must_have_the_same_encryption(world: World, here: str, there: list[str]) -> None:
    p, d = await world.site("p"), await world.site("d", clear=there)
    states: list[LinkState] = []
    p.hub.subscribe(lambda event: states.append(event) if isinstance(event, LinkState) else None)
    p.link("d", f"127.0.0.1:{d.listener.port}", encryption=here)
    await until(lambda: any("link.encryption" in state.detail for state in states))
    assert not any(state.up for state in states)


@pytest.mark.parametrize("encryption", ["tls", "control"])
async def test_a_resumed_transfer_sends_only_what_is_missing(world: World, encryption: str) -> None:
    p = await world.site("p")
    d = await world.site("d", clear=["p"] if encryption == "control" else [])
    line = await world.line(d)
    p.link("d", line.address, encryption=encryption, rate=20e6)
    await until(lambda: p.hub.links.up().get("d", False))
    before = line.passed
    line.cut_after = before + SIZE // 2
    await send(p, d)
    assert line.cut_after is None, "control and bulk connections broke half-way"
    under_way = 2 * (1 << 20)  # batches on their way when it broke
    assert line.passed - before <= 1.02 * SIZE + under_way
    assert d.hub.stats().received_bytes == SIZE


async def test_progress_of_a_transfer_is_known_until_its_end(world: World) -> None:
    p, d, _ = await joined(world, "tls", rate=2e6)
    told: list[Progress] = []

    async def ask() -> None:
        while True:
            told.extend(p.hub.progress())
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(ask())
    await send(p, d)
    asking.cancel()
    assert len(told) >= 2
    assert {progress.total for progress in told if progress.done} == {SIZE}
    assert {(progress.xfer, progress.to, progress.absent) for progress in told} == {("x", "d", 0)}
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
    half = next(progress for progress in told if progress.done)
    assert half.seconds == pytest.approx((SIZE - half.done) / 2e6, rel=0.5)
    (whole,) = p.hub.progress()
    assert (whole.done, whole.delivered, whole.seconds) == (SIZE, True, 0.0)
    p.hub.end("x")
    assert not p.hub.progress()


async def test_cold_connections_are_opened_by_padding_of_one_round_trip(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdrelay.depot.line_estimate.LineEstimate.base_rtt", 0.05)
    monkeypatch.setattr("pdrelay.depot.tcp_lanes.COLD_SECONDS", 0.0)
    p, d, line = await joined(world, "tls", rate=100e6)
    await until(lambda: line.passed > 2 * (1 << 20))  # 5 MB would be one round trip's, a connection takes 1 MiB
    assert line.passed <= 2 * (1 << 20) * 1.02 + 20_000
    assert d.hub.stats().received_bytes == 0
    sizes: list[float] = []

    def noted(_: TcpLanes, size: float, padding: object) -> list[object]:
        sizes.append(size)
        return []

    monkeypatch.setattr(TcpLanes, "warm", noted)
    p.hub.transfer(Transfer(xfer="later", names=PAGES, to="d"), "gateway")
    assert sizes == [pytest.approx(5e6)], "an offer warms what has cooled down since"
