"""Whole requests: against the equations by hand, and in every kind of trouble."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import ROOMY, TINY, WAN, run, spec, trio
from worlds import settings as handoff_settings

from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.policy.placement import CdcPd, IdcPd
from pdrelay.sim.line import LineSpec
from pdrelay.sim.scenario import Fault, Scenario, ServiceLevel
from pdrelay.sim.simulation import Simulation
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.base import Request
from pdrelay.workload.generators import AgenticRequests, AgentSessions

COLD = Request(0.0, 1000, 200, cached=0)
WARM = Request(0.0, 1000, 200, cached=990)
STEP = TINY.decode_step_seconds(1, 1000)
WAY = WAN.rtt / 2


def test_a_cold_request_without_a_relay_waits_for_the_line() -> None:
    _, (record,) = run(trio(CdcPd()), COLD)
    assert record.pipeline == "p_md"
    prefill = TINY.prefill_seconds(1000)
    assert record.ttft == pytest.approx(prefill)
    # Layers leave while the others are computed, once the offer is answered, and the line takes longer than that.
    assert record.kv_ready == pytest.approx(WAN.rtt + 1000 * 1024 / 1e5 + WAY, abs=1e-3)
    assert record.ttst == pytest.approx(record.kv_ready + STEP + WAY, abs=1e-4)
    assert record.finished == pytest.approx(record.kv_ready + 199 * STEP + WAY, rel=0.01)
    assert record.wan_bytes == 1000 * 1024


def test_kv_crosses_the_line_in_whole_pages() -> None:
    paged = replace(TINY, page_tokens=16)
    world = trio(CdcPd())
    instances = tuple(instance._replace(profile=paged) for instance in world.instances)
    _, (cold,) = run(world._replace(instances=instances), COLD)
    assert cold.wan_bytes == 1008 * 1024, "63 pages of 16 hold 1,000 tokens"
    assert cold.kv_ready == pytest.approx(WAN.rtt + 1008 * 1024 / 1e5 + WAY, abs=1e-3)
    _, (warm,) = run(world._replace(instances=instances), WARM)
    assert warm.wan_bytes == 32 * 1024, "it has 61 whole pages of the 990 tokens, and the last one goes whole"


def test_nothing_crosses_before_the_offer_is_answered() -> None:
    short, line = Request(0.0, 100, 2, cached=0), LineSpec(rate=1e6, rtt=0.5)
    _, (record,) = run(trio(CdcPd(), line=line), short)
    assert record.prefill_end < line.rtt
    assert record.kv_ready == pytest.approx(line.rtt + 100 * 1024 / 1e6 + line.rtt / 2)
    _, (nothing,) = run(trio(CdcPd(), line=line), Request(0.0, 100, 2, cached=100))
    assert nothing.kv_ready == pytest.approx(nothing.prefill_end)


def test_a_line_that_is_faster_than_prefill_waits_for_its_end() -> None:
    _, (record,) = run(trio(CdcPd(), line=WAN._replace(rate=1e9)), COLD)
    assert record.kv_ready == pytest.approx(record.prefill_end + WAY)


@pytest.mark.parametrize(("slices", "late"), [(math.inf, 0), (4, 122)])  # of the last chunk, which has 488 tokens
def test_the_last_slice_of_layers_leaves_when_all_are_computed(slices: float, late: int) -> None:
    _, (record,) = run(trio(CdcPd(), line=WAN._replace(rate=1e8), slices=slices), COLD)
    assert record.kv_ready == pytest.approx(record.prefill_end + late * 1024 / 1e8 + WAY)


def test_a_token_that_is_on_its_way_back_is_not_lost_with_its_engine() -> None:
    _, (before,) = run(trio(CdcPd()), COLD)
    dies = Fault("m", before.finished - WAY / 2, 1.0)
    _, (record,) = run(trio(CdcPd(), faults=(dies,)), COLD)
    assert (record.status, record.finished, record.rescues) == ("ok", before.finished, 0)


def test_without_overlap_the_line_starts_when_prefill_ends() -> None:
    _, (record,) = run(trio(CdcPd(), overlap=False), COLD)
    assert record.kv_ready == pytest.approx(record.prefill_end + 10.24 + 0.015)


def test_the_relay_hides_the_line_and_hands_over() -> None:
    _, (record,) = run(trio(), COLD._replace(output=1500))
    assert record.pipeline == "p_rld_md"
    assert record.ttst == pytest.approx(record.ttft + STEP, abs=1e-4)
    made = (record.handoff_start - record.prefill_end) / STEP
    assert record.relay_tokens == pytest.approx(made, abs=2)
    assert record.handoff_index == record.relay_tokens + 1
    assert record.main_tokens == 1500 - record.handoff_index
    # One-Shot: the reader waits for the message, the forward over what the relay has made, and the way back.
    pause = WAN.rtt + TINY.extend_seconds(record.handoff_index, 1000)
    assert record.handoff_done - record.handoff_start == pytest.approx(pause, abs=1e-3)
    assert record.largest_gap == pytest.approx(pause, abs=1e-3)


def test_catch_up_shortens_the_gap_for_some_more_relay_tokens() -> None:
    line = WAN._replace(rtt=0.002)
    one_shot = run(trio(line=line, handoff=handoff_settings("one_shot")), COLD._replace(output=1500))[1][0]
    catch_up = run(trio(line=line, handoff=handoff_settings("catch_up")), COLD._replace(output=1500))[1][0]
    assert catch_up.rounds >= 1
    assert catch_up.relay_tokens > one_shot.relay_tokens
    assert catch_up.largest_gap < one_shot.largest_gap / 1.5


def test_a_warm_request_skips_the_relay_and_sends_the_rest_only() -> None:
    _, (record,) = run(trio(), WARM)
    assert (record.pipeline, record.relay_tokens) == ("p_md", 0)
    assert record.wan_bytes == 10 * 1024
    assert record.cached == 990
    assert record.ttft == pytest.approx(TINY.prefill_seconds(10, 990))


def test_a_short_answer_ends_on_the_relay_and_its_prefix_still_arrives() -> None:
    turns = [
        Request(0.0, 1024, 20, (1, 2), session="s", then=Request(0.0, 1536, 20, (1, 2, 3), think=20.0)),
    ]
    _, (first, second) = run(trio(), *turns)
    assert (first.main_tokens, first.relay_tokens) == (0, 19)
    assert second.arrival == pytest.approx(first.finished + 20)
    assert (second.hit_rate, second.cached) == (pytest.approx(2 / 3), 1024)
    assert second.wan_bytes == 512 * 1024


def test_one_token_ends_with_prefill() -> None:
    _, (record,) = run(trio(), COLD._replace(output=1))
    assert record.finished == record.first_token
    assert math.isnan(record.tpot)


def test_the_papers_reading_takes_token_zero_from_decode() -> None:
    _, (record,) = run(trio(CdcPd(), token_zero=False), COLD)
    assert record.first_token == pytest.approx(record.kv_ready + STEP + WAY, abs=1e-4)
    assert record.main_tokens == 200


def test_the_relays_bound_is_enforced_under_pressure() -> None:
    tight = replace(TINY, kv_capacity=1100 * TINY.kv_per_token)
    scenario = trio(handoff=handoff_settings("one_shot", tokens=20), profile=TINY)
    pressed = scenario._replace(
        instances=tuple(i._replace(profile=tight) if i.name == "r" else i for i in scenario.instances)
    )
    _, (record,) = run(pressed, Request(0.0, 1040, 50, cached=0))
    assert 5 <= record.relay_tokens < 25  # a quarter of the bound: held back: the reader waits for main decode
    assert record.main_tokens > 0
    assert record.largest_gap > 5


def test_idc_decodes_beside_prefill() -> None:
    near = Scenario((spec("p", "a", Role.PREFILL), spec("d", "a", Role.DECODE)), {}, IdcPd())
    _, (record,) = run(near, COLD)
    assert record.pipeline == "p_d"
    assert record.ttst == pytest.approx(TINY.prefill_seconds(1000) + STEP, abs=1e-4)


def test_what_does_not_fit_is_refused_and_nothing_else_is_disturbed() -> None:
    outcome, records = run(trio(), COLD, Request(0.1, 70_000, 10), COLD._replace(arrival=0.2))
    assert [record.status for record in records] == ["ok", "refused", "ok"]
    assert outcome.metrics.as_dict()["failed"] == 1


def test_a_full_depot_makes_transfers_wait_and_loses_nobody() -> None:
    arena = 1500 * 1024.0
    requests = [COLD._replace(arrival=0.1 * i) for i in range(6)]
    _, records = run(trio(depots={"b": arena}), *requests)
    assert [record.status for record in records] == ["ok"] * 6
    # One after the other: while one prompt is pinned, the next has no room.
    ready = [record.kv_ready for record in records if not math.isnan(record.kv_ready)]
    assert all(b - a >= 10 for a, b in itertools.pairwise(sorted(ready)))


def test_goodput_counts_what_keeps_every_level() -> None:
    scenario = trio(slo=ServiceLevel(ttft=1.0, tpot=0.016))
    outcome, _ = run(scenario, WARM, COLD._replace(arrival=30.0, output=30))
    figures = outcome.metrics.as_dict()
    assert figures["completed"] == 2
    assert 0 < figures["request_goodput"] <= figures["request_throughput"]


# ---- load ----


def test_offered_load_above_the_lines_rate_never_gets_through() -> None:
    line = WAN._replace(rate=2e6)
    requests = [Request(0.01 * i, 1000, 20, cached=0) for i in range(400)]  # 100 MB/s onto 2 MB/s
    outcome, records = run(trio(CdcPd(), line), *requests)
    assert outcome.lines["a->b"]["sent_bytes"] == pytest.approx(400 * 1000 * 1024)
    last = max(record.kv_ready for record in records)
    assert last >= 400 * 1000 * 1024 / 2e6
    assert outcome.lines["a->b"]["utilisation"] <= 1


def test_events_per_request_do_not_grow_with_the_trace() -> None:
    def events(count: int) -> float:
        simulation = Simulation(trio(profile=ROOMY, line=LineSpec(1e8, 0.03)))
        simulation.run(AgenticRequests(Arrivals(1.0), prompt=2000, output_mean=50).requests(0), count)
        return simulation.events.set / count

    assert events(2000) <= 1.1 * events(500)


# ---- faults ----


@pytest.mark.parametrize("mode", ["one_shot", "catch_up"])
@pytest.mark.parametrize(
    ("instance", "at", "served"),
    [
        ("p", 0.02, 0),  # before token 0: the gateway answers with an error
        ("p", 3.0, 1),  # the depot has the pages
        ("r", 3.0, 1),  # main decode goes on when it is ready
        ("m", 3.0, 1),  # the relay finishes alone
        ("m", 12.0, 1),  # main decode was decoding: the request starts again from its token ids
    ],
)
def test_a_dead_part_costs_time_not_the_request(mode: str, instance: str, at: float, served: int) -> None:
    scenario = trio(handoff=handoff_settings(mode), faults=(Fault(instance, at, 2.0),))  # type: ignore[arg-type]
    outcome, (record,) = run(scenario, COLD._replace(output=1200))
    assert outcome.metrics.counts["ok"] == served
    if not served:
        assert record.status == "failed"


def test_an_outage_sends_new_requests_to_the_relay() -> None:
    line = WAN._replace(outages=((0.0, 60.0),))
    _, (warm, other) = run(trio(line=line), WARM._replace(arrival=10.0), WARM._replace(arrival=90.0))
    assert (warm.pipeline, warm.main_tokens) == ("p_rld_md", 0)
    assert other.pipeline == "p_md"


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    preference=st.sampled_from(["one_shot", "catch_up", "dynamic"]),
    faults=st.lists(
        st.builds(Fault, st.sampled_from(["p", "r", "m"]), st.floats(0, 30), st.floats(0.1, 5)), max_size=3
    ),
    capacity=st.integers(4000, 60_000),
    arena=st.integers(4000, 60_000),
    connections=st.integers(1, 8),
    outages=st.sampled_from([(), ((5.0, 9.0),)]),
    ranks=st.integers(1, 3),
    overlap=st.booleans(),
    slices=st.sampled_from([math.inf, 4]),
)  # fmt: skip
def test_every_request_ends_once_whatever_happens(
    seed, preference, faults, capacity, arena, connections, outages, ranks, overlap, slices
) -> None:
    """Records check causality and token counts themselves; the engine, line, depot and cache their capacities."""
    profile = replace(TINY, kv_capacity=capacity * TINY.kv_per_token)
    line = LineSpec(4e5, 0.03, connections, 2e5, fluctuation=0.3, loss_every=5, loss_lasts=1, outages=outages)
    scenario = trio(
        line=line, profile=profile, handoff=handoff_settings(preference, 50, 10.0), faults=_apart(faults),
        depots={"a": arena * 1024.0, "b": arena * 1024.0}, overlap=overlap, slices=slices, seed=seed,
    )  # fmt: skip
    scenario = scenario._replace(instances=tuple(i._replace(ranks=ranks) for i in scenario.instances))
    workload = AgentSessions(Arrivals(1.0), turns=3, first=600, shared=512, added=200, output_mean=80, think=0.5,
                             longest=3000, block_tokens=128)  # fmt: skip
    simulation = Simulation(scenario)
    outcome = simulation.run(workload.requests(seed), 12)
    assert sum(outcome.metrics.counts.values()) >= 12
    assert not faults or outcome.metrics.counts["ok"] >= 0
    if not faults:
        assert outcome.metrics.counts["failed"] == 0
    assert all(line.sent <= line.could_send + 1 for line in simulation.lines.values())


def _apart(faults: list[Fault]) -> tuple[Fault, ...]:
    """Faults of one instance that do not overlap."""
    chosen: list[Fault] = []
    for fault in sorted(faults, key=lambda fault: fault.at):
        if all(f.instance != fault.instance or f.at + f.lasts < fault.at for f in chosen):
            chosen.append(fault)
    return tuple(chosen)


def test_a_seed_decides_everything() -> None:
    def figures(seed: int) -> dict[str, object]:
        line = LineSpec(4e5, 0.03, 4, 2e5, fluctuation=0.3, loss_every=5, loss_lasts=1)
        workload = AgenticRequests(Arrivals(1.0), prompt=2000, output_mean=50)
        return Simulation(trio(line=line, seed=seed)).run(workload.requests(seed), 100).as_dict()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_a_scenario_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fault.instance: found 'x', expected one of p, m, r"):
        Simulation(trio(faults=(Fault("x", 1, 1),)))
    with pytest.raises(ConfigError, match="line: found none from a to b"):
        run(trio()._replace(lines={}), COLD)
