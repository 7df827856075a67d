"""The planner's rates and those that the simulator sustains, over random deployments and workloads."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cases import H20, H200

from pdrelay.cluster.topology import Role
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.lengths import Lengths, lognormal
from pdrelay.perf.profile import DecodeCost, ForwardCost
from pdrelay.plan.evaluate import Evaluator
from pdrelay.plan.problem import LOCAL_ONLY, Plan, Pool, Problem, Promise, Wire
from pdrelay.plan.scenario import sustained
from pdrelay.plan.verify import AGREED, why_rate

CLUSTERS = ("home", "far", "other")
EXTEND = ForwardCost(fixed=0.01, per_token=2e-5, per_pair=1e-10)


def _profile(random: np.random.Generator, name: str) -> InstanceProfile:
    """Some chip: prefill like a published one, a decode step that grows, more or less memory."""
    base = H200 if random.random() < 0.5 else H20
    decode = DecodeCost(
        fixed=random.uniform(0.008, 0.03),
        per_sequence=random.uniform(0, 4e-4),
        per_context_token=random.uniform(0, 6e-8),
    )
    scaled = base.scaled(name, prefill=random.uniform(0.6, 2.0))
    return replace(
        scaled, name=name, decode=decode, extend=EXTEND, max_num_seqs=int(random.integers(8, 40)),
        kv_capacity=10 ** random.uniform(9.8, 11.7), price=random.uniform(1, 10),
    )  # fmt: skip


def _lengths(random: np.random.Generator) -> Lengths:
    lengths = lognormal(random.uniform(7.5, 10), random.uniform(0.3, 1.1), 64, 65_536, random.uniform(40, 300))
    if random.random() < 0.4:
        return lengths
    hits = random.beta(3, 2, lengths.count)
    return replace(lengths, cached=lengths.prompt * hits)


def scenario(seed: int) -> tuple[Problem, Plan]:
    """A random problem and plan in which every stage has something to do."""
    random = np.random.default_rng(seed)
    remotes = CLUSTERS[1 : 1 + int(random.integers(0, 3))]
    lengths = _lengths(random)
    pools = [Pool(c, c, _profile(random, c), 99) for c in ("home", *remotes)]
    wires = {(c, "home"): Wire(10 ** random.uniform(8.2, 10), random.uniform(0.001, 0.08), 256,
                               wire_ratio=random.uniform(0.5, 1.0)) for c in remotes}  # fmt: skip
    cache = {c: random.uniform(0.5, 1.0) for c in ("home", *remotes)} if random.random() < 0.5 else {}
    problem = Problem(tuple(pools), wires, lengths, Promise(tpot=random.uniform(0.03, 0.06)), cache=cache)
    counts = {("home", Role.DECODE): int(random.integers(1, 4))}
    local = int(random.integers(0 if remotes else 1, 4))
    if local:
        counts["home", Role.PREFILL] = local
    for cluster in remotes:
        counts[cluster, Role.PREFILL] = int(random.integers(1, 4))
    relayed = bool(remotes) and random.random() < 0.4
    if relayed:
        # What ends on a relay does not wait for a line that falls behind more and more: nothing that lasts.
        wires = {ends: wire._replace(rate=10 * wire.rate) for ends, wire in wires.items()}
        problem = problem._replace(wires=wires)
        counts[remotes[0], Role.RELAY] = 1
    threshold = float(np.quantile(lengths.uncached(problem.cached_share("home")), random.uniform(0.2, 0.8)))
    if not remotes or not local:
        threshold = 0.0 if remotes else LOCAL_ONLY
    return problem, Plan("home", threshold, counts, hit_threshold=random.uniform(0.3, 1.0) if relayed else 0.0)


def memory_bound(seed: int) -> tuple[Problem, Plan]:
    """A random decode instance whose memory alone limits its batch."""
    random = np.random.default_rng(seed)
    lengths = lognormal(random.uniform(7.5, 10), random.uniform(0.3, 1.1), 64, 65_536, random.uniform(40, 1200))
    tight = replace(_profile(random, "tight"), max_num_seqs=256, kv_capacity=random.uniform(2.5e9, 12e9))
    pools = (Pool("p", "home", replace(H200, kv_capacity=1e12), 99), Pool("d", "home", tight, 99))
    plan = Plan("home", LOCAL_ONLY, {("p", Role.PREFILL): 40, ("d", Role.DECODE): 1})
    return Problem(pools, {}, lengths), plan


def agree(problem: Problem, plan: Plan, seed: int, turns: int) -> None:
    worth = Evaluator(problem).worth(plan)
    assert 0 < worth.rates.total < math.inf
    most = sustained(problem, plan, worth.rates.total, seed, turns)
    off = most.rate / worth.rates.total - 1
    assert abs(off) <= AGREED, f"{off:+.1%}: {why_rate(worth, most)}"


@pytest.mark.parametrize("seed", range(4))
def test_rates_agree_within_5_percent(seed: int) -> None:
    agree(*scenario(seed), seed, 10)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 54))
def test_rates_agree_within_5_percent_over_fifty_scenarios(seed: int) -> None:
    agree(*scenario(seed), seed, 21)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_rates_agree_where_memory_limits_the_batch(seed: int) -> None:
    problem, plan = memory_bound(seed)
    assert Evaluator(problem).worth(plan).rates.binding == "decode"
    agree(problem, plan, seed, 10)


def test_the_random_scenarios_reach_every_stage() -> None:
    found = {Evaluator(p).worth(plan).rates.binding.split(" from")[0] for p, plan in map(scenario, range(54))}
    assert found == {"remote prefill", "local prefill", "decode", "line"}


def test_a_disagreement_says_what_was_busy() -> None:
    problem, plan = scenario(0)
    worth = Evaluator(problem).worth(plan)
    most = sustained(problem, plan, worth.rates.total)
    text = why_rate(worth, most)
    assert f"{worth.rates.binding} was expected to be full first" in text
    assert "%" in text
