"""Whose turn it is: small first with ageing, or equal shares; background last."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.depot.schedule import AGEING, Fair, Schedule, Srpt

RATE = 1e6


@dataclass(eq=False)
class Flow:
    started: float
    remaining: int
    background: bool = False
    turn: float = 0.0
    sent: int = 0


def serve(schedule: Schedule, flows: list[Flow], now: float, size: int) -> Flow:
    """One batch, of at most `size` bytes, for the flow whose turn it is."""
    flow = schedule.order(flows, now, RATE)[0]
    taken = min(size, flow.remaining)
    schedule.served(flow, taken)
    flow.remaining -= taken
    flow.sent += taken
    return flow


flows = st.builds(
    Flow, started=st.floats(0, 100), remaining=st.integers(1, 10**9), background=st.booleans()
)  # fmt: skip


@given(st.lists(flows, min_size=2, max_size=8), st.floats(100, 1000))
def test_srpt_lets_nobody_pass_who_came_later_than_the_bound(waiting: list[Flow], now: float) -> None:
    """INV-SCHED-1."""
    order = Srpt().order(waiting, now, RATE)
    for at, flow in enumerate(order):
        bound = flow.remaining / (AGEING * RATE)
        for earlier in order[:at]:
            assert earlier.background <= flow.background
            if earlier.background == flow.background:
                assert earlier.started - flow.started <= bound + 1e-6


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 50_000)), max_size=200),
    st.integers(1, 2_000_000),
    st.integers(1_000, 100_000),
)
def test_a_large_transfer_ends_although_small_ones_keep_coming(
    arrivals: list[tuple[float, int]], large: int, batch: int
) -> None:
    """INV-SCHED-1 as time: behind what was there, what came within the bound, and itself, nothing keeps it waiting."""
    waiting, schedule, now = [Flow(0.0, large)], Srpt(), 0.0
    target, bound = waiting[0], large / (AGEING * RATE)
    coming, clock = [], 0.0
    for gap, size in arrivals:
        clock += gap
        coming.append(Flow(clock, size))
    ahead = sum(flow.remaining for flow in coming if flow.started <= bound)
    while target.remaining:
        waiting = [flow for flow in waiting if flow.remaining] + [flow for flow in coming if flow.started <= now]
        coming = [flow for flow in coming if flow.started > now]
        before = sum(flow.sent for flow in waiting)
        serve(schedule, waiting, now, batch)
        now += (sum(flow.sent for flow in waiting) - before) / RATE
    assert now <= (large + ahead) / RATE + 1e-6


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6), st.lists(st.integers(1, 10_000), max_size=100))
def test_fair_shares_differ_by_a_batch_of_each_at_most(sizes: list[int], batches: list[int]) -> None:
    """INV-SCHED-2, among flows that wait all the time, one of which comes late."""
    schedule, waiting = Fair(), [Flow(float(at), size) for at, size in enumerate(sizes)]
    late = waiting.pop()
    largest = max(batches, default=0)
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            waiting.append(late)
            for flow in waiting:
                flow.sent = 0
        if all(flow.remaining > batch for flow in waiting):
            serve(schedule, waiting, float(number), batch)
    assert max(flow.sent for flow in waiting) - min(flow.sent for flow in waiting) <= 2 * largest


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=6))
def test_what_goes_ahead_of_a_flow_is_what_the_schedule_sends_before_its_end(flows: list[tuple[int, bool]]) -> None:
    for schedule in (Srpt(), Fair()):
        waiting = [Flow(0.0, size, background=background) for size, background in flows]
        told = {id(flow): ahead for flow, ahead in schedule.ahead(waiting, 0.0, RATE)}
        sent = 0
        while left := [flow for flow in waiting if flow.remaining]:
            flow = serve(schedule, left, 0.0, 1)
            sent += 1
            if not flow.remaining:  # of flows that end together any may be the last: a byte of each
                assert abs(sent - flow.sent - told[id(flow)]) <= len(waiting)


def test_background_waits_for_every_live_one_and_is_served_in_the_gaps() -> None:
    for schedule in (Srpt(), Fair()):
        live, background = Flow(5.0, 1000), Flow(0.0, 10, background=True)
        assert serve(schedule, [background, live], 1e9, 500) is live
        assert serve(schedule, [background, live], 1e9, 500) is live
        assert serve(schedule, [background], 1e9, 500) is background


def test_a_newcomer_gets_no_credit_for_the_time_before_it_came() -> None:
    schedule, old = Fair(), Flow(0.0, 10**6)
    for _ in range(100):
        serve(schedule, [old], 0.0, 1000)
    new = Flow(1.0, 10**6)
    turns = [serve(schedule, [old, new], 1.0, 1000) is new for _ in range(20)]
    assert sum(turns) == 10


def test_a_small_delta_does_not_wait_behind_a_large_one() -> None:
    large, small = Flow(0.0, 300_000_000), Flow(10.0, 3_000_000)
    assert Srpt().order([large, small], 10.0, 2.5e9 / 8)[0] is small
