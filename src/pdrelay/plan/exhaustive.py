"""All instance counts at all thresholds, where they are few: every point's rate is an upper bound of its goodput."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.lengths import Array
from pdrelay.perf.stages import system_rate
from pdrelay.plan.loads import Loads
from pdrelay.plan.moves import roles_of
from pdrelay.plan.problem import LOCAL_ONLY, Plan, Pool, Problem
from pdrelay.plan.rates import decode_capacity, local_capacity, offload_capacity

MOST_COMBINATIONS = 6000
THRESHOLDS = 160

Slot = tuple[Pool, Role]


class Candidate(NamedTuple):
    """Counts at the threshold where they carry most, with bounds of what they are worth."""

    plan: Plan
    rate: float  # requests/s that the stages carry
    price: float  # of the instances for an hour


def combinations(problem: Problem) -> int:
    """Number of instance counts over all main clusters."""
    total = 0
    for main in problem.clusters(Role.DECODE):
        ways = 1
        for pool in problem.pools:
            ways *= _ways(pool, len(_roles(problem, main, pool)))
        total += ways
    return total


def thresholds_of(problem: Problem, main: str, count: int = THRESHOLDS) -> Array:
    """Everything, nothing and `count` thresholds between, where both sides can prefill."""
    prefills = problem.clusters(Role.PREFILL)
    local = main in prefills
    remote = any(cluster != main and problem.wire(cluster, main) for cluster in prefills)
    if not remote:
        return np.array([LOCAL_ONLY])
    if not local:
        return np.array([0.0])
    uncached = problem.lengths.uncached(problem.cached_share(main))
    least, most = float(uncached.min()), float(uncached.max())
    between = np.geomspace(least, most, count) if most > least else np.array([])
    return np.concatenate(([0.0], between, [LOCAL_ONLY]))


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every combination at its best threshold."""
    for main in problem.clusters(Role.DECODE):
        loads = Loads(problem, main, thresholds_of(problem, main))
        slots = [(pool, role) for pool in problem.pools for role in _roles(problem, main, pool)]
        counts = _counts(slots)
        if not len(counts):
            continue
        rate, column = _best(loads, slots, counts)
        prices = counts @ np.array([pool.price for pool, _ in slots])
        for row in np.flatnonzero(rate > 0):
            chosen = {(pool.name, role): int(n) for (pool, role), n in zip(slots, counts[row], strict=True) if n}
            plan = Plan(main, float(loads.thresholds[column[row]]), chosen)
            yield Candidate(plan, float(rate[row]), float(prices[row]))


def _best(loads: Loads, slots: list[Slot], counts: Array) -> tuple[Array, Array]:
    """Rate and column of the best threshold of each row."""
    prefills = {p.name: counts[:, i : i + 1] for i, (p, role) in enumerate(slots) if role is Role.PREFILL}
    decodes = {p.name: counts[:, i] for i, (p, role) in enumerate(slots) if role is Role.DECODE}
    shape = (len(counts), len(loads.thresholds))
    offload = np.broadcast_to(offload_capacity(loads, prefills), shape)
    local = np.broadcast_to(local_capacity(loads, prefills), shape)
    decode = np.broadcast_to(decode_capacity(loads, decodes), (len(counts),))
    total = system_rate(offload, np.broadcast_to(loads.offloaded, shape), local, decode[:, None])
    column = total.argmax(axis=1)
    rate: Array = total[np.arange(len(counts)), column]
    return rate, column


def _roles(problem: Problem, main: str, pool: Pool) -> list[Role]:
    """Roles but relay, which is added to what is good without."""
    middle = Plan(main, 1.0, {})
    return [role for role in roles_of(problem, middle, pool) if role is not Role.RELAY]


def _ways(pool: Pool, roles: int) -> int:
    """Ways to give at most all instances of a pool to so many roles."""
    return math.comb(pool.most + roles, roles)


def _counts(slots: list[Slot]) -> Array:
    """All rows of counts that the pools allow."""
    pools = list(dict.fromkeys(pool for pool, _ in slots))
    parts = []
    for pool in pools:
        roles = sum(1 for each, _ in slots if each == pool)
        parts.append([c for c in itertools.product(range(pool.most + 1), repeat=roles) if sum(c) <= pool.most])
    rows = [[n for part in row for n in part] for row in itertools.product(*parts)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(slots))
