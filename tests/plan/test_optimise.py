"""The optimum: against brute force, for each aim, with few and many instances, and when nothing is feasible."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from cases import H20, H200, case

from pdrelay.bench.planner import large
from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.perf.lengths import lognormal
from pdrelay.plan import optimise as module
from pdrelay.plan.evaluate import Evaluator, feasible, value
from pdrelay.plan.infeasible import explain
from pdrelay.plan.optimise import optimise
from pdrelay.plan.problem import LOCAL_ONLY, Plan, Pool, Problem, Promise, Wire, price_of
from pdrelay.plan.sensitivity import binding, neighbours, sensitivity


def brute(problem: Problem) -> float:
    """The best value over all counts and many thresholds, one evaluation each."""
    evaluator = Evaluator(problem)
    best = (-math.inf,)
    for remote, local, decode in itertools.product(range(5), range(9), range(9)):
        if local + decode > 8:
            continue
        counts = {("h200", Role.PREFILL): remote, ("h20", Role.PREFILL): local, ("h20", Role.DECODE): decode}
        for threshold in (0.0, LOCAL_ONLY, *(8000 * 1.25**i for i in range(9))):
            best = max(best, value(problem, evaluator.worth(Plan("near", threshold, counts))))
    return best


@pytest.mark.parametrize("aim", ["rate", "ratio", "cost"])
def test_the_optimum_is_at_least_as_good_as_brute_force(aim: str) -> None:
    problem = case(aim=aim, rate=1.5, lengths=case().lengths.coarse(64))
    found = optimise(problem)
    assert found.method == "exhaustive"
    assert feasible(problem, found.best)
    assert value(problem, found.best) >= brute(problem)


def test_the_solver_finds_what_exhaustive_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case(Promise(ttft=8.0, tpot=0.025))
    everything = optimise(problem)
    monkeypatch.setattr(module, "MOST_COMBINATIONS", 0)
    solved = optimise(problem)
    assert (everything.method, solved.method) == ("exhaustive", "solver")
    assert solved.best.goodput == pytest.approx(everything.best.goodput, rel=0.01)


def test_the_papers_optimum_comes_out() -> None:
    best = optimise(case()).best
    counts = {(pool, role): n for (pool, role), n in best.plan.counts.items() if n}
    assert counts == {("h200", Role.PREFILL): 4, ("h20", Role.PREFILL): 3, ("h20", Role.DECODE): 5}
    assert best.plan.threshold == pytest.approx(19_400, rel=0.03)


def test_a_thousand_instances_are_planned_within_what_there_is_and_what_is_promised() -> None:
    problem = large()
    assert sum(pool.most for pool in problem.pools) == 1000
    found = optimise(problem, seconds=2.0)
    assert found.method == "solver"
    assert feasible(problem, found.best)
    for pool in problem.pools:
        assert sum(found.best.plan.of(pool.name, role) for role in Role) <= pool.most
    assert Evaluator(problem).times(found.best.plan, found.best.goodput).ttft[1] <= 8.0 * 1.01


def test_a_promise_costs_goodput_and_is_kept() -> None:
    free, kept = optimise(case()).best, optimise(case(Promise(ttft=6.0, tpot=0.025))).best
    assert kept.goodput < free.goodput
    times = Evaluator(case(Promise(ttft=6.0, tpot=0.025))).times(kept.plan, kept.goodput)
    assert times.ttft[1] <= 6.0 * 1.001


def test_the_least_cost_serves_the_rate_and_nothing_cheaper_does() -> None:
    problem = case(aim="cost", rate=1.5)
    found = optimise(problem)
    assert found.best.goodput >= 1.5 * 0.999
    cheaper = [worth for worth in found.front if worth.cost < found.best.cost * 0.999]
    assert cheaper
    assert all(worth.goodput < 1.5 for worth in cheaper)


def test_a_thin_line_binds_and_is_named() -> None:
    problem = case(wires={("far", "near"): Wire(2e9 / 8)})
    best = optimise(problem).best
    assert best.rates.binding in ("line from far", "local prefill", "decode")
    alone = Plan("near", 0.0, {("h200", Role.PREFILL): 4, ("h20", Role.DECODE): 8})
    assert Evaluator(problem).worth(alone).rates.binding == "line from far"
    wide = optimise(case()).best
    assert best.goodput < wide.goodput


def test_a_codec_moves_the_threshold_down() -> None:
    def threshold(ratio: float) -> float:
        return optimise(case(wires={("far", "near"): Wire(8e9 / 8, wire_ratio=ratio)})).best.plan.threshold

    assert threshold(0.5) < threshold(1.0)


def test_a_cache_that_holds_little_asks_for_more_prefill() -> None:
    lengths = case().lengths
    agentic = lengths.__class__(lengths.weight, lengths.prompt, lengths.prompt * 0.9, lengths.output)
    warm = optimise(case(lengths=agentic)).best
    cold = optimise(case(lengths=agentic, cache={"near": 0.5, "far": 0.5})).best
    assert cold.goodput < warm.goodput
    assert cold.plan.counts != warm.plan.counts


def test_egress_is_paid_for() -> None:
    free = optimise(case(aim="ratio")).best
    dear = optimise(case(aim="ratio", wires={("far", "near"): Wire(100e9 / 8, price=1e-9)})).best
    assert free.rates.offloaded > 0
    assert dear.ratio < free.ratio
    assert dear.rates.offloaded < free.rates.offloaded


def test_two_remote_clusters_share_what_is_offloaded() -> None:
    pools = (*case().pools, Pool("more", "third", H200, 3, frozenset({Role.PREFILL})))
    wires = {("far", "near"): Wire(4e9 / 8), ("third", "near"): Wire(100e9 / 8)}
    both, one = optimise(case(pools=pools, wires=wires)).best, optimise(case(wires=wires)).best
    assert both.goodput > one.goodput
    assert both.plan.of("h200", Role.PREFILL) >= 1
    assert both.plan.of("more", Role.PREFILL) >= 1


def test_a_relay_is_planned_where_only_it_keeps_the_second_token() -> None:
    slow = {("far", "near"): Wire(100e9 / 8, rtt=0.01, connection_rate=1e9 / 8, connections=256)}
    pools = (Pool("h200", "far", H200, 5), Pool("h20", "near", H20, 8, frozenset({Role.DECODE})))
    promise = Promise(ttst=6.0, tpot=0.025)
    without = optimise(case(promise, pools=pools, wires=slow, relay=False)).best
    found = optimise(case(promise, pools=pools, wires=slow)).best
    assert found.plan.of("h200", Role.RELAY) >= 1
    assert found.plan.hit_threshold > 0
    assert found.goodput > without.goodput


# ---- what is not feasible ----


def test_a_rate_that_is_too_high_is_named_with_the_most_that_there_is() -> None:
    problem = case(aim="cost", rate=9.0)
    assert not feasible(problem, optimise(problem).best)
    (reason,) = explain(problem)
    assert reason.promise == "rate"
    assert reason.nearest == pytest.approx(optimise(case()).best.goodput, rel=0.01)
    assert "9 requests/s cannot be kept" in reason.sentence


@pytest.mark.parametrize(("promise", "name"), [(Promise(ttft=1.0, tpot=0.025), "ttft"), (Promise(tpot=0.020), "tpot")])
def test_a_time_that_is_too_short_is_named_with_the_shortest_that_is_possible(promise: Promise, name: str) -> None:
    problem = case(promise)
    (reason,) = explain(problem)
    assert reason.promise == name
    assert reason.asked < reason.nearest < 4
    near = problem._replace(promise=promise._replace(**{name: reason.nearest * 1.01}))
    assert feasible(near, optimise(near).best)
    below = problem._replace(promise=promise._replace(**{name: reason.nearest * 0.97}))
    assert not feasible(below, optimise(below).best)


@pytest.mark.full
def test_times_that_are_too_short_together_are_stretched_alike() -> None:
    promise = Promise(ttft=3.0, ttst=2.5, tpot=0.020)
    (reason,) = explain(case(promise))
    assert "cannot be kept together" in reason.sentence
    times = {name: getattr(promise, name) * reason.nearest * 1.01 for name in ("ttft", "ttst", "tpot")}
    near = case(Promise(**times))
    assert feasible(near, optimise(near).best)
    below = case(Promise(**{name: limit * 0.96 for name, limit in times.items()}))
    assert not feasible(below, optimise(below).best)


def test_a_promise_that_only_another_threshold_keeps_is_kept() -> None:
    lengths = lognormal(9.0, 0.9, 128, 131_072, 64)
    slow = replace(H20.scaled("slow", prefill=0.2), price=1.0)
    pools = (case().pools[0]._replace(most=2), Pool("slow", "near", slow, 30, frozenset({Role.PREFILL, Role.DECODE})))
    problem = case(Promise(ttft=3.2, share=0.95), pools=pools, lengths=lengths)
    plans = [Plan("near", t, {("h200", Role.PREFILL): 2, ("slow", Role.PREFILL): 20, ("slow", Role.DECODE): 10})
             for t in (500.0, 1000.0, 2000.0)]  # fmt: skip
    by_hand = max(Evaluator(problem).worth(plan).goodput for plan in plans)
    assert by_hand > 0
    assert optimise(problem).best.goodput >= by_hand


def test_no_instance_is_planned_that_does_nothing() -> None:
    pools = (case().pools[0]._replace(most=100_000), case().pools[1])
    found = optimise(case(pools=pools), seconds=0.5)
    assert found.method == "solver"
    assert found.best.plan.of("h200", Role.PREFILL) < 100


def test_requests_without_anything_to_decode_are_planned() -> None:
    lengths = case().lengths
    single = lengths.__class__(lengths.weight, lengths.prompt, lengths.cached, lengths.output * 0 + 1)
    assert optimise(case(lengths=single)).best.goodput > 0


def test_requests_that_fit_nowhere_are_named() -> None:
    problem = case(lengths=case().lengths.scaled(prompt=1000))
    (reason,) = explain(problem)
    assert reason.promise == "memory"
    assert reason.nearest < reason.asked


def test_problems_that_are_none_say_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="found none for decode"):
        optimise(case(pools=case().pools[:1]))
    free = tuple(pool._replace(profile=replace(pool.profile, price=0.0)) for pool in case().pools)
    with pytest.raises(ConfigError, match="found 'ratio' and no price"):
        optimise(case(aim="ratio", pools=free))
    with pytest.raises(ConfigError, match="aim = 'cost'"):
        optimise(case(aim="cost", rate=0.0))


# ---- around the optimum ----


def test_no_neighbour_is_better_and_the_binding_stage_has_the_most_valuable_one() -> None:
    problem = case()
    best = optimise(problem).best
    beside = neighbours(problem, best)
    assert len(beside) > 5
    assert all(value(problem, each.worth) <= value(problem, best) for each in beside)
    assert binding(problem, best) in ("remote prefill", "local prefill")


def test_a_promise_binds_where_waiting_does() -> None:
    problem = case(Promise(ttft=6.0, tpot=0.025))
    assert binding(problem, optimise(problem).best).startswith("promised TTFT (P90 6 s)")


def test_conditions_move_the_optimum_the_way_they_must() -> None:
    problem = case(Promise(ttft=8.0, tpot=0.025))
    best = optimise(problem).best
    changed = {each.condition: each for each in sensitivity(problem, best)}
    assert changed["prompts x 1.25"].kept.goodput < best.goodput
    assert changed["price of h20 x 1.25"].kept.cost > best.cost
    assert changed["price of h20 x 1.25"].kept.goodput == pytest.approx(best.goodput)
    for each in changed.values():
        assert each.adapted.goodput >= each.kept.goodput * 0.99
    assert price_of(problem, best.plan.counts) == pytest.approx(best.cost)
