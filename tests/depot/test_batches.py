"""How large batches are, where they are cut, and that large ones arrive whatever happens to their connection."""

from __future__ import annotations

import asyncio

import pytest
from depot_kit import PART_BYTES, contract, intact, names, produce, until
from hypothesis import given
from hypothesis import strategies as st
from link_kit import SHAPE, World

from pdrelay.cluster.topology import ScheduleName
from pdrelay.depot.base import Transfer
from pdrelay.depot.flow_control import BATCH_SECONDS, LARGE_BATCH, LARGE_SECONDS, MAX_BATCH, SPREAD, FlowControl
from pdrelay.depot.line_estimate import LineEstimate
from pdrelay.depot.memory import MemoryDepot, link
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.schedule import SCHEDULES
from pdrelay.depot.tcp_lanes import TcpLanes

SMALL = contract()
PARTS = SMALL.layouts[0].parts


@pytest.mark.parametrize(
    ("room", "runs"),
    [
        (2 * PARTS, [PARTS, PARTS]),
        (2 * PARTS + 2, [PARTS, PARTS]),  # a piece of two parts is less than a quarter of the batch
        (2 * PARTS + 3, [PARTS, PARTS, 3]),
        (PARTS - 1, [PARTS - 1]),  # nothing else would be in it
    ],
)
async def test_no_page_is_cut_for_the_last_quarter_of_a_batch(room: int, runs: list[int]) -> None:
    p, d = (MemoryDepot(name, 8 * SMALL.page_bytes, clock=lambda: 0.0) for name in "pd")
    between = link(p, d, stepped=True)
    produce(p.engine("prefill", SMALL), "r", names(1, 2, 3, 4), SMALL)
    await p.control().transfer(Transfer(xfer="x", names=names(1, 2, 3, 4), to="d"))
    while between.deliver_message():
        pass
    batches = []
    while (batch := p.hub.senders.next_batch("d", room * PART_BYTES, 0.0)) is not None:
        batches.append([run.parts for run in batch.runs])
        p.hub.senders.outbox.written(batch)
    assert batches[0] == runs
    assert sum(map(sum, batches)) == 4 * PARTS, "what was left out is in a later batch"


@pytest.mark.parametrize(("schedule", "urgency"), [("srpt", 0), ("fair", 1)])
async def test_what_is_left_of_a_small_transfer_goes_ahead_unless_shares_are_equal(
    schedule: ScheduleName, urgency: int
) -> None:
    p, d = (MemoryDepot(name, 8 * SMALL.page_bytes, clock=lambda: 0.0) for name in "pd")
    between = link(p, d, stepped=True)
    between.schedule = SCHEDULES[schedule]()
    produce(p.engine("prefill", SMALL), "r", names(1, 2, 3, 4), SMALL)
    await p.control().transfer(Transfer(xfer="large", names=names(1, 2, 3), to="d"))
    await p.control().transfer(Transfer(xfer="small", names=names(4), to="d"))
    while between.deliver_message():
        pass
    found = {}
    while (batch := p.hub.senders.next_batch("d", PART_BYTES, 0.0, urgent_bytes=SMALL.page_bytes)) is not None:
        found.setdefault(batch.xfer, batch.urgency)
        p.hub.senders.outbox.written(batch)
    assert found == {"small": urgency, "large": 1}


@given(st.floats(1e5, 1e11), st.integers(0, 1 << 34), st.integers(1, 64))
def test_a_large_batch_lasts_no_longer_and_leaves_some_for_each_connection(
    rate: float, ready: int, connections: int
) -> None:
    flow = FlowControl(LineEstimate(rate, 0.001), connections, None)
    flow.sent(1, 1 << 40, 0.0)
    flow.acked(1, 1 << 40, 0.0)  # the line is known to take more than any batch
    size = flow.large_batch_bytes(ready)
    assert flow.batch_bytes <= size <= LARGE_BATCH
    if size > flow.batch_bytes:
        assert size > MAX_BATCH or size <= (flow.batch_bytes + 1) * LARGE_SECONDS / BATCH_SECONDS
        assert size <= rate * LARGE_SECONDS / connections
        assert size * SPREAD * connections <= ready


@pytest.mark.parametrize("encryption", ["tls", "control"])
async def test_a_connection_that_breaks_inside_a_large_batch_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, encryption: str
) -> None:
    monkeypatch.setattr("pdrelay.depot.flow_control.MAX_BATCH", 32 << 10)
    p, d = await world.site("p"), await world.site("d", clear=["p"] if encryption == "control" else [])
    line = await world.line(d)
    p.link("d", f"127.0.0.1:{d.listener.port}", line.address, encryption=encryption)
    await until(lambda: p.hub.links.up().get("d", False))
    sizes: list[int] = []
    broken: list[int] = []
    put = TcpLanes.put

    def noted(lanes: TcpLanes, batch: FlyingBatch) -> None:
        sizes.append(batch.payload)
        if not broken and batch.payload > 8 * (32 << 10):
            broken.append(batch.payload)
            line.cut_after = line.passed + batch.payload // 2
        put(lanes, batch)

    monkeypatch.setattr(TcpLanes, "put", noted)
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    pages = names(*range(60))
    await asyncio.to_thread(produce, prefill, "r", pages, SHAPE)
    p.hub.transfer(Transfer(xfer="x", names=pages, to="d"), "gateway")
    await until(lambda: p.hub.senders.stats("x").delivered, 30)
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    assert broken
    assert line.cut_after is None
    assert sum(sizes) > 60 * SHAPE.page_bytes, "what was under way was sent again"
    assert d.hub.stats().corrupt_parts == 0
    await asyncio.to_thread(decode.release, "r")
    p.hub.end("x")
    await until(lambda: p.idle() and d.idle())
