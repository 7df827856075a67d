"""The best plan: exhaustive where there are few instances, HiGHS where there are many, local search after both.

The stages' rates bound the goodput from above, so candidates are looked at by falling bound until none can be better
than what was found. Waiting is what the bound leaves out; it is evaluated for each candidate that is looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import cmp_to_key
from typing import Literal, NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.plan import exhaustive
from pdrelay.plan.evaluate import Evaluator, Worth, better, feasible
from pdrelay.plan.exhaustive import MOST_COMBINATIONS, Candidate, candidates, combinations
from pdrelay.plan.linear import Program, Solved
from pdrelay.plan.loads import Loads
from pdrelay.plan.moves import HIT_THRESHOLDS, climb, until
from pdrelay.plan.problem import Plan, Problem, check, holding

POINTS = 256
"""Of the lengths while searching."""

EXAMINED = 120
"""Candidates whose waiting is evaluated."""

HOPELESS = 50
"""Candidates of which none keeps the promise at any rate, after which no more are looked at."""

HOPEFUL, SPREAD = 16, 10
"""Of those, so many are tried at other thresholds."""

COARSE_THRESHOLDS = 24
SHAPES = 4
"""Main clusters and thresholds for which the whole program is solved, after relaxations of all."""

HEADROOMS = (1.0, 1.1, 1.3, 1.8)
"""Tried where a promise leaves no stage full."""

FRONT = 12

Method = Literal["exhaustive", "solver"]


class Optimum(NamedTuple):
    """The best plan and what else was found on the way."""

    best: Worth
    front: list[Worth]  # no other plan has more goodput for as little, by cost
    method: Method
    seconds: float
    examined: int


def optimise(problem: Problem, seconds: float = 4.0) -> Optimum:
    """The best plan there is; local search ends after `seconds`. Raises ConfigError for a problem that is none.

    The best may be infeasible; see plan/evaluate.py.
    """
    check(problem)
    started = time.perf_counter()
    problem = problem._replace(pools=tuple(holding(problem)) or problem.pools)
    coarse = problem._replace(lengths=problem.lengths.coarse(POINTS))
    search = Evaluator(coarse)
    few = combinations(problem) <= MOST_COMBINATIONS
    all_of_them = list(candidates(coarse)) if few else []
    found = _examine(search, all_of_them) if few else _solve(search)
    if not found[0].goodput:
        found = _sorted(problem, [*_other_thresholds(search, found[:HOPEFUL]), *found])
    go_on = until(max(0.3, seconds - (time.perf_counter() - started)))
    polished = [climb(search, each, go_on) for each in found[:2]]
    exact = Evaluator(problem)
    best = _best(exact, [each.plan for each in [*polished, *found[:4]]])
    best = climb(exact, best, go_on)
    beside = [search.worth(c.plan) for c in _outermost(all_of_them)] if few else _levels(search, best)
    front = _front([*search.seen(), *beside, best])
    for pool in problem.pools:
        used = sum(best.plan.of(pool.name, role) for role in Role)
        assert used <= pool.most, f"INV-PLAN-1: {used} of {pool.most} {pool.name}"
    return Optimum(
        best, [exact.worth(each.plan) for each in front], "exhaustive" if few else "solver",
        time.perf_counter() - started, len(search.seen()),
    )  # fmt: skip


def _other_thresholds(search: Evaluator, worths: list[Worth]) -> list[Worth]:
    """The threshold that carries most is not the one whose times are the shortest."""
    found = []
    for plan in (worth.plan for worth in worths):
        if 0 < plan.threshold < math.inf:
            spread = exhaustive.thresholds_of(search.problem, plan.main, SPREAD)[1:-1]
            found += [search.worth(plan._replace(threshold=threshold)) for threshold in spread.tolist()]
    return found


def _best(evaluator: Evaluator, plans: list[Plan]) -> Worth:
    worths = [evaluator.worth(plan) for plan in plans]
    best = worths[0]
    for worth in worths[1:]:
        best = worth if better(evaluator.problem, worth, best) else best
    return best


# ---- few instances ----


def _examine(search: Evaluator, found: list[Candidate]) -> list[Worth]:
    """The best candidates, by falling bound; best first."""
    problem = search.problem
    bound = _bound(problem)
    ranked = sorted((c for c in found if bound(c) > -math.inf), key=bound, reverse=True)
    worths: list[Worth] = []
    best: Worth | None = None
    for number, candidate in enumerate(ranked[:EXAMINED]):
        if number >= HOPELESS and best is not None and not best.goodput:
            break
        if best is not None and feasible(problem, best) and bound(candidate) < _reached(problem, best):
            break
        for plan in _with_relays(problem, candidate.plan):
            worth = search.worth(plan)
            worths.append(worth)
            best = worth if best is None or better(problem, worth, best) else best
    if not worths:
        worths = [search.worth(Plan(problem.clusters(Role.DECODE)[0], 0.0, {}))]
    return _sorted(problem, worths)


def _bound(problem: Problem) -> Callable[[Candidate], float]:
    """What a candidate is worth at most; -inf for what cannot do what is asked for."""
    if problem.aim == "cost":
        return lambda c: -c.price if c.rate >= problem.rate else -math.inf
    if problem.aim == "ratio":
        return lambda c: c.rate / c.price if c.price else math.inf
    return lambda c: c.rate - 1e-9 * c.price


def _reached(problem: Problem, best: Worth) -> float:
    """The same measure of a plan that was evaluated."""
    if problem.aim == "cost":
        return -best.cost
    if problem.aim == "ratio":
        return best.goodput / best.cost if best.cost else math.inf
    return best.goodput


def _with_relays(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan, and where a second token is promised, with a relay beside each remote cluster."""
    yield plan
    if not problem.relay or problem.promise.ttst == math.inf or plan.threshold == math.inf:
        return
    for pool in problem.pools:
        used = sum(plan.of(pool.name, role) for role in Role)
        offloads = any(n and role is Role.PREFILL and p.name == name and p.cluster == pool.cluster
                       for (name, role), n in plan.counts.items() for p in problem.pools)  # fmt: skip
        if pool.cluster != plan.main and offloads and Role.RELAY in pool.roles and used < pool.most:
            for hits in HIT_THRESHOLDS[-3:]:
                yield plan._replace(counts={**plan.counts, (pool.name, Role.RELAY): 1}, hit_threshold=hits)


def _sorted(problem: Problem, worths: list[Worth]) -> list[Worth]:
    def order(a: Worth, b: Worth) -> int:
        return -1 if better(problem, a, b) else 1 if better(problem, b, a) else 0

    return sorted(worths, key=cmp_to_key(order))


# ---- many instances ----


class _Shape(NamedTuple):
    loads: Loads
    column: int  # of its thresholds
    bound: float


def _solve(search: Evaluator) -> list[Worth]:
    """Relaxations of every main cluster and threshold, whole programs of the best, waiting by headroom."""
    problem = search.problem
    shapes = sorted(_shapes(problem), key=lambda shape: shape.bound, reverse=True)
    worths: list[Worth] = []
    promised = min(problem.promise.ttft, problem.promise.ttst) < math.inf
    for shape in shapes[:SHAPES]:
        for headroom in HEADROOMS if promised else HEADROOMS[:1]:
            solved = _program(problem, shape, headroom, whole=True)
            if solved is None:
                break
            plan = solved.plan(shape.loads.main, float(shape.loads.thresholds[shape.column]))
            worths += [search.worth(each) for each in _with_relays(problem, plan)]
            if problem.aim == "cost" and any(feasible(problem, worth) for worth in worths[-4:]):
                break
    if not worths:
        worths = [search.worth(Plan(problem.clusters(Role.DECODE)[0], 0.0, {}))]
    return _sorted(problem, worths)


def _shapes(problem: Problem) -> Iterator[_Shape]:
    for main in problem.clusters(Role.DECODE):
        loads = Loads(problem, main, exhaustive.thresholds_of(problem, main, COARSE_THRESHOLDS))
        for index in range(len(loads.thresholds)):
            solved = _program(problem, _Shape(loads, index, 0.0), 1.0, whole=False)
            if solved is not None and solved.rate > 0:
                bound = {"rate": solved.rate, "cost": -solved.cost, "ratio": solved.rate / max(solved.cost, 1e-12)}
                yield _Shape(loads, index, bound[problem.aim])


def _program(problem: Problem, shape: _Shape, headroom: float, *, whole: bool) -> Solved | None:
    program = Program(shape.loads, shape.column, headroom=headroom, whole=whole)
    if problem.aim == "cost":
        return program.least_cost(problem.rate)
    return program.best_ratio() if problem.aim == "ratio" else program.most_rate()


def _levels(search: Evaluator, best: Worth) -> list[Worth]:
    """Cheapest plans for shares of the best plan's rate, at its threshold."""
    loads = Loads(search.problem, best.plan.main, np.array([best.plan.threshold]))
    headroom = best.rates.total / best.goodput if best.goodput else 1.0
    most = Program(loads, 0).most_rate()
    found = []
    for level in range(1, FRONT):
        rate = (most.rate if most is not None else best.rates.total) * level / FRONT / headroom
        solved = Program(loads, 0, headroom=headroom).least_cost(rate)
        if solved is not None:
            plan = solved.plan(best.plan.main, best.plan.threshold)
            found.append(search.worth(plan._replace(hit_threshold=best.plan.hit_threshold)))
    return found


def _outermost(found: list[Candidate]) -> list[Candidate]:
    """Candidates with a higher rate than all that cost less."""
    front: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.price, -c.rate)):
        if not front or candidate.rate > front[-1].rate * 1.001:
            front.append(candidate)
    return front


def _front(worths: list[Worth]) -> list[Worth]:
    """Plans that no other one beats in cost and goodput both, by cost; the rest is thinned out evenly."""
    front: list[Worth] = []
    for worth in sorted((w for w in worths if w.goodput > 0), key=lambda w: (w.cost, -w.goodput)):
        if not front or worth.goodput > front[-1].goodput * 1.001:
            front.append(worth)
    if len(front) <= 2 * FRONT:
        return front
    kept = np.unique(np.linspace(0, len(front) - 1, 2 * FRONT).round().astype(int))
    return [front[i] for i in kept]
