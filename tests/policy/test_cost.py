"""Sending against recomputing, and what placement makes of a measured line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.cluster.topology import Role
from pdrelay.perf.profile import ForwardCost
from pdrelay.policy.base import InstanceView, LinkView, Pipeline, Placement, RequestView, Snapshot
from pdrelay.policy.cost import weigh
from pdrelay.policy.placement import Pdd

COST = ForwardCost(fixed=0.0, per_token=1e-3, per_pair=0.0)  # 1000 tokens a second
BYTES = 50_000.0  # of KV, a token
LINE = LinkView(rate=50e6, rtt=0.0)  # 1000 tokens a second as well


def test_the_break_even_is_where_the_line_is_as_fast_as_the_prefill() -> None:
    assert not weigh(1000, 0, 1000 * BYTES, LINE, COST).recompute_is_cheaper
    assert weigh(1000, 0, 1000 * BYTES, LINE._replace(rate=LINE.rate * 0.999), COST).recompute_is_cheaper
    assert not weigh(1001, 0, 1000 * BYTES, LINE, COST).recompute_is_cheaper


@given(st.integers(1, 100_000), st.floats(1e3, 1e10), st.floats(0, 1e10), st.floats(0, 0.5))
def test_what_waits_for_the_line_only_ever_speaks_for_recomputing(
    missing: int, rate: float, queued: float, rtt: float
) -> None:
    empty = LinkView(rate, rtt)
    before = weigh(missing, 0, missing * BYTES, empty, COST)
    after = weigh(missing, 0, missing * BYTES, empty._replace(queued=queued), COST)
    assert after.send >= before.send
    assert after.recompute_is_cheaper >= before.recompute_is_cheaper


def test_without_a_line_recomputing_is_all_there_is() -> None:
    assert weigh(10**6, 0, 1.0, None, COST).recompute_is_cheaper
    assert weigh(10**6, 0, 1.0, LINE._replace(down="cut"), COST).recompute_is_cheaper


INSTANCES = (
    InstanceView("p-0", "a", frozenset({Role.PREFILL}), healthy=True, host="host-a"),
    InstanceView("rld-0", "a", frozenset({Role.RELAY}), healthy=True, host="host-a"),
    InstanceView("md-0", "b", frozenset({Role.DECODE}), healthy=True, host="host-b"),
)
NEAR = InstanceView("p-1", "b", frozenset({Role.PREFILL}), healthy=True, waiting=9, prefill_cost=COST, host="host-b")


def place(policy: Pdd, line: LinkView, *more: InstanceView, held: int = 0) -> Placement:
    request = RequestView(1000, {"md-0": held}, kv_bytes_per_token=BYTES)
    return policy.place(policy.initial(), request, Snapshot((*INSTANCES, *more), {("a", "b"): line}), 0.0)[1]


@pytest.mark.parametrize(
    ("line", "pipeline"),
    [
        (LINE, Pipeline.P_MD),  # 1.0 s
        (LINE._replace(rate=45e6), Pipeline.P_RLD_MD),  # 1.11 s
        (LINE._replace(queued=5e6), Pipeline.P_RLD_MD),  # 1.1 s
        (LINE._replace(rate=100e6, queued=49e6), Pipeline.P_MD),  # 0.99 s
    ],
)
def test_the_predicted_time_on_the_line_decides_whether_a_relay_is_needed(line: LinkView, pipeline: Pipeline) -> None:
    assert place(Pdd(wan_budget=1.0), line).pipeline is pipeline
    assert place(Pdd(), line).pipeline is Pipeline.P_RLD_MD


def test_prefill_beside_main_decode_takes_what_the_line_would_carry_later() -> None:
    allowed, slow = Pdd(recompute=True), LINE._replace(queued=1e6)
    placed = place(allowed, slow, NEAR)
    assert (placed.pipeline, placed.prefill, placed.main) == (Pipeline.P_D, "p-1", "md-0")
    assert "the line takes 1.02 s" in placed.reason
    assert place(allowed, LINE, NEAR).pipeline is Pipeline.P_RLD_MD
    assert place(Pdd(), slow, NEAR).pipeline is Pipeline.P_RLD_MD
    assert place(allowed, slow, NEAR._replace(healthy=False)).pipeline is Pipeline.P_RLD_MD
    assert place(allowed, slow, NEAR._replace(host="host-c")).pipeline is Pipeline.P_RLD_MD  # no way between them
    assert place(allowed, slow, NEAR._replace(prefill_cost=None)).pipeline is Pipeline.P_RLD_MD
    assert place(allowed, LINE._replace(down="cut"), NEAR).pipeline is Pipeline.P_D
