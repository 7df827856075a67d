"""The shared line: fair shares, conservation, the pool, and what goes wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.sim.events import Events
from pdrelay.sim.line import Line, LineSpec, Transfer

MB = 1e6


class Send:
    """A transfer whose bytes are all there at once."""

    def __init__(self, events: Events, line: Line, at: float, size: float) -> None:
        self.at, self.size, self.arrived = at, size, math.inf
        self.transfer: Transfer | None = None
        self._events, self._line = events, line
        events.at(at, self._go)

    def _go(self) -> None:
        self.transfer = self._line.open(self._arrived)
        self._line.give(self.transfer, self.size)
        self._line.close(self.transfer)

    def _arrived(self, transfer: Transfer) -> None:
        assert self.arrived == math.inf
        assert transfer.given == pytest.approx(self.size * self._line.spec.wire_ratio)
        self.arrived = self._events.now


def run(spec: LineSpec, sends: list[tuple[float, float]], seed: int = 0) -> tuple[Line, list[Send]]:
    events = Events()
    line = Line(events, spec, seed)
    flows = [Send(events, line, at, size) for at, size in sends]
    events.run()
    line.settle()
    return line, flows


def test_one_transfer_has_the_line() -> None:
    _, (only,) = run(LineSpec(10 * MB, rtt=0.1), [(1.0, 20 * MB)])
    assert only.arrived == pytest.approx(1 + 2 + 0.05)


def test_two_transfers_share_until_one_is_done() -> None:
    _, (long, short) = run(LineSpec(10 * MB), [(0.0, 20 * MB), (1.0, 2 * MB)])
    assert short.arrived == pytest.approx(1 + 0.4)
    assert long.arrived == pytest.approx(2.2)


@pytest.mark.parametrize(("long", "ends", "short_ends"), [(20 * MB, 2.1, 1.3), (11 * MB, 1.1, 1.2)])
def test_what_is_under_way_goes_before_what_is_more_urgent(long: float, ends: float, short_ends: float) -> None:
    spec = LineSpec(10 * MB, discipline="srpt", under_way=0.2)
    _, (first, second) = run(spec, [(0.0, long), (1.0, MB)])
    assert second.arrived == pytest.approx(short_ends)  # without: 1.1
    assert first.arrived == pytest.approx(ends)


def test_a_connection_has_a_cap() -> None:
    line, flows = run(LineSpec(10 * MB, connection_rate=1 * MB), [(0.0, MB)] * 4)
    assert [flow.arrived for flow in flows] == [pytest.approx(1.0)] * 4
    assert line.sent == pytest.approx(4 * MB)


def test_without_a_free_connection_transfers_wait_their_turn() -> None:
    line, flows = run(LineSpec(10 * MB, connections=1), [(0.0, 10 * MB), (0.1, MB), (0.2, MB)])
    assert [flow.arrived for flow in flows] == [pytest.approx(t) for t in (1.0, 1.1, 1.2)]
    assert [flow.transfer.queued for flow in flows if flow.transfer] == [0, pytest.approx(0.9), pytest.approx(0.9)]
    assert line.connection_seconds == pytest.approx(1.2)


def test_srpt_lets_the_short_one_pass() -> None:
    sends = [(0.0, 10 * MB), (0.5, MB), (0.55, 2 * MB)]
    _, flows = run(LineSpec(10 * MB, discipline="srpt"), sends)
    assert [flow.arrived for flow in flows] == [pytest.approx(t) for t in (1.3, 0.6, 0.8)]
    assert flows[0].transfer is not None
    assert flows[0].transfer.queued == pytest.approx(0.3)


def test_setup_is_paid_once_and_holds_a_connection() -> None:
    _, flows = run(LineSpec(10 * MB, connections=1, setup=0.2), [(0.0, MB), (0.0, MB)])
    assert [flow.arrived for flow in flows] == [pytest.approx(0.3), pytest.approx(0.6)]


def test_bytes_that_come_to_exist_later_are_sent_later() -> None:
    events = Events()
    line = Line(events, LineSpec(10 * MB))
    arrived = list[float]()
    transfer = line.open(lambda _: arrived.append(events.now))
    line.give(transfer, 5 * MB)  # sent by 0.5
    events.at(2.0, lambda: line.give(transfer, 10 * MB))
    events.at(2.5, lambda: line.give(transfer, 5 * MB))
    events.at(2.6, lambda: line.close(transfer))
    events.run()
    assert arrived == [pytest.approx(3.5)]
    assert transfer.given == 20 * MB


def test_nothing_to_send_arrives_at_once() -> None:
    _, (empty,) = run(LineSpec(10 * MB, rtt=0.2), [(3.0, 0.0)])
    assert empty.arrived == 3.0


def test_an_outage_stops_everything_and_loses_nothing() -> None:
    line, flows = run(LineSpec(10 * MB, outages=((0.5, 10.5),)), [(0.0, 10 * MB), (5.0, MB)])
    assert flows[0].arrived == pytest.approx(11.1)
    assert flows[1].arrived == pytest.approx(10.7)
    assert line.could_send == pytest.approx(11 * MB)


def test_a_codec_makes_the_bytes_fewer() -> None:
    line, (only,) = run(LineSpec(10 * MB, wire_ratio=0.5), [(0.0, 20 * MB)])
    assert only.arrived == pytest.approx(1.0)
    assert line.sent == pytest.approx(10 * MB)


def test_a_fluctuating_line_carries_its_mean() -> None:
    spec = LineSpec(10 * MB, fluctuation=0.5, fluctuates_every=0.1)
    line, (only,) = run(spec, [(0.0, 1000 * MB)])
    assert only.arrived == pytest.approx(100, rel=0.1)
    assert line.sent == pytest.approx(1000 * MB)


def test_loss_episodes_stretch_transfers_by_their_share() -> None:
    spec = LineSpec(math.inf, connection_rate=MB, connections=10**6, loss_every=5.0, loss_lasts=2.0)
    _, flows = run(spec._replace(rate=1e12), [(0.0, 100 * MB)] * 200)
    mean = sum(flow.arrived for flow in flows) / len(flows)
    assert mean == pytest.approx(100 * (1 + 2 / 5), rel=0.03)


def test_offered_load_above_the_capacity_never_gets_through() -> None:
    sends = [(i * 0.01, 10 * MB) for i in range(1000)]  # a gigabyte a second for ten seconds, onto 10 MB/s
    events = Events()
    line = Line(events, LineSpec(10 * MB))
    flows = [Send(events, line, at, size) for at, size in sends]
    events.run(until=10.0)
    events.now = 10.0
    line.settle()
    assert line.sent <= 100 * MB * (1 + 1e-9)
    assert sum(flow.size for flow in flows if flow.arrived < math.inf) <= 100 * MB
    events.run()
    assert max(flow.arrived for flow in flows) == pytest.approx(1000, rel=1e-6)


SENDS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 50 * MB)), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(
    sends=SENDS, connections=st.integers(1, 8), cap=st.sampled_from([math.inf, 2 * MB, 20 * MB]),
    discipline=st.sampled_from(["fair", "srpt"]), fluctuation=st.sampled_from([0.0, 0.8]),
    loss=st.sampled_from([0.0, 1.0]), outage=st.sampled_from([(), ((3.0, 7.0),)]), ahead=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_conservation_whatever_happens(sends, connections, cap, discipline, fluctuation, loss, outage, ahead) -> None:
    spec = LineSpec(
        10 * MB, 0.02, connections, cap, discipline, ahead, setup=0.01, fluctuation=fluctuation, fluctuates_every=0.5,
        loss_every=3.0, loss_lasts=loss, outages=outage,
    )  # fmt: skip
    line, flows = run(spec, sends)
    assert all(flow.arrived < math.inf for flow in flows)  # every transfer ends once
    assert line.sent == pytest.approx(sum(size for _, size in sends), rel=1e-6, abs=10)  # and nothing is lost or made
    assert line.sent <= line.could_send + 10
    for flow in flows:  # nobody is faster than the line, or its connection, alone
        fastest = flow.size / min(cap, 1e9 if fluctuation else 10 * MB)
        assert flow.arrived - flow.at >= fastest - 1e-6
    assert (line.connected, line.queue) == (0, 0)


@settings(deadline=None, max_examples=30)
@given(sends=st.lists(st.tuples(st.floats(0, 20), st.floats(1, 50 * MB)), min_size=1, max_size=25))
def test_sharing_is_that_of_small_time_slices(sends: list[tuple[float, float]]) -> None:
    _, flows = run(LineSpec(10 * MB), sends)
    left, arrived, now, slice_ = dict(enumerate(s for _, s in sends)), dict[int, float](), 0.0, 0.005
    while left:
        active = [i for i in left if sends[i][0] <= now]
        for i in active:
            left[i] -= 10 * MB / len(active) * slice_
            if left[i] <= 0:
                arrived[i] = now
        left = {i: size for i, size in left.items() if size > 0}
        now += slice_
    for i, flow in enumerate(flows):
        assert flow.arrived == pytest.approx(arrived[i], abs=0.01 * len(sends) + 0.02)
