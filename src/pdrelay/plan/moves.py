"""Plans beside a plan: one instance more, fewer, or in another role; another threshold; another H."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.plan.evaluate import Evaluator, Worth, better
from pdrelay.plan.problem import LOCAL_ONLY, Counts, Plan, Pool, Problem

THRESHOLD_STEPS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.11, 1.25)
HIT_THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
STEPS = (1, 4, 16, 64)
"""Instances that a move takes at once; large ones where there are many."""


class Move(NamedTuple):
    """A plan and what was changed to get there."""

    name: str
    plan: Plan


def counts_moves(problem: Problem, plan: Plan) -> Iterator[Move]:
    """Other instance counts."""
    for pool in problem.pools:
        used = sum(plan.of(pool.name, role) for role in Role)
        for step in (step for step in STEPS if step == 1 or step <= used / 2):
            for role in roles_of(problem, plan, pool):
                count = plan.of(pool.name, role)
                if used + step <= pool.most:
                    yield _change(plan, f"{step} more {pool.name} for {role.value}", {(pool.name, role): count + step})
                if count >= step:
                    yield _change(plan, f"{step} fewer {pool.name} for {role.value}", {(pool.name, role): count - step})
                for other in roles_of(problem, plan, pool):
                    if other is not role and count >= step:
                        moved = {(pool.name, role): count - step, (pool.name, other): plan.of(pool.name, other) + step}
                        yield _change(plan, f"{step} {pool.name} from {role.value} to {other.value}", moved)


def threshold_moves(_problem: Problem, plan: Plan) -> Iterator[Move]:
    """Other thresholds, while there are two sides to choose from."""
    if 0 < plan.threshold < LOCAL_ONLY:
        for factor in THRESHOLD_STEPS:
            yield Move(f"t {factor - 1:+.0%}", plan._replace(threshold=plan.threshold * factor))


def hit_threshold_moves(_problem: Problem, plan: Plan) -> Iterator[Move]:
    """Other H, where relays are."""
    if any(count and role is Role.RELAY for (_, role), count in plan.counts.items()):
        for hits in HIT_THRESHOLDS:
            if hits != plan.hit_threshold:
                yield Move(f"H {hits:g}", plan._replace(hit_threshold=hits))


def swap_moves(problem: Problem, plan: Plan) -> Iterator[Move]:
    """One instance fewer here, one more there: what costs less."""
    for pool in problem.pools:
        for role in (Role.PREFILL, Role.DECODE):
            if not plan.of(pool.name, role) or role not in roles_of(problem, plan, pool):
                continue
            for other in problem.pools:
                used = sum(plan.of(other.name, each) for each in Role)
                if other.name != pool.name and used < other.most and role in roles_of(problem, plan, other):
                    change: Counts = {(pool.name, role): plan.of(pool.name, role) - 1,
                              (other.name, role): plan.of(other.name, role) + 1}  # fmt: skip
                    yield _change(plan, f"{other.name} in place of {pool.name} for {role.value}", change)


def all_moves(problem: Problem, plan: Plan) -> Iterator[Move]:
    """Every neighbour."""
    for kind in (counts_moves, threshold_moves, hit_threshold_moves, swap_moves):
        yield from kind(problem, plan)


def roles_of(problem: Problem, plan: Plan, pool: Pool) -> list[Role]:
    """What instances of `pool` may do in a plan that decodes at its main cluster."""
    at_main = pool.cluster == plan.main
    reaches = at_main or problem.wire(pool.cluster, plan.main) is not None
    useful = {
        Role.PREFILL: reaches and (plan.threshold > 0 if at_main else plan.threshold < LOCAL_ONLY),
        Role.DECODE: at_main,
        Role.RELAY: problem.relay and reaches and not at_main and problem.promise.ttst < math.inf
        and plan.hit_threshold > 0,
    }  # fmt: skip
    return [role for role in Role if role in pool.roles and useful[role]]


Accept = Callable[[], bool]


def until(seconds: float) -> Accept:
    """True for so long from now on."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def climb(evaluator: Evaluator, start: Worth, go_on: Accept) -> Worth:
    """Moves to better neighbours until there is none, or `go_on` says that it is time to stop.

    Where nothing is served no neighbour tells the way.
    """
    best = start
    improved = start.goodput > 0
    while improved and go_on():
        improved = False
        for kind in (counts_moves, threshold_moves, hit_threshold_moves, swap_moves):
            for move in kind(evaluator.problem, best.plan):
                found = evaluator.worth(move.plan)
                if better(evaluator.problem, found, best):
                    best, improved = found, True
                    break
                if not go_on():
                    return best
    return best


def _change(plan: Plan, name: str, counts: Counts) -> Move:
    merged = {key: count for key, count in {**plan.counts, **counts}.items() if count}
    return Move(name, plan._replace(counts=merged))
