"""Instance counts by mixed-integer linear programming, for one main cluster and one threshold.

With both fixed, every stage's rate is linear in the counts, so the rate, the cost and, by Dinkelbach's method, their
ratio are optimised exactly. HiGHS solves it; waiting is not linear and is added by `headroom` (plan/optimise.py).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.perf.batch import full_rate
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan, Pool
from pdrelay.plan.rates import decode_batch

MOST_RATE = 1e7
HOUR = 3600.0
ROUNDS = 4
"""Of Dinkelbach's method, which doubles its digits with each."""


class Solved(NamedTuple):
    """Counts, the rate that the stages carry with them, and the cost of an hour; counts are fractions when relaxed."""

    counts: dict[tuple[str, Role], float]
    rate: float
    cost: float

    def plan(self, main: str, threshold: float) -> Plan:
        """As a plan of whole instances."""
        counts = {key: round(count) for key, count in self.counts.items() if round(count)}
        return Plan(main, threshold, counts)


class Program:
    """The program of one point. `headroom` is how much more than its share each stage must be able to do."""

    def __init__(self, loads: Loads, index: int, *, headroom: float = 1.0, whole: bool = True) -> None:
        self._loads, self._index, self._headroom = loads, index, headroom
        self._solver = _solver()
        self._whole = whole
        self._counts: dict[tuple[str, Role], Any] = {}
        self._rate = self._solver.addVariable(0.0, MOST_RATE)
        self._cost: list[Any] = []
        self._local()
        self._remote()
        self._decode()
        self._inventory()

    # ---- aims ----

    def most_rate(self) -> Solved | None:
        """The highest rate; the cheapest way to it."""
        found = self._solve(self._rate, cost_weight=0.0)
        if found is None or not found.rate:
            return found
        least = self.least_cost(found.rate * (1 - 1e-6))
        self._solver.changeColBounds(self._rate.index, 0.0, MOST_RATE)
        return least or found

    def least_cost(self, rate: float) -> Solved | None:
        """The cheapest way to `rate`; None when there is none."""
        self._solver.changeColBounds(self._rate.index, rate, rate)
        return self._solve(None, cost_weight=1.0)

    def best_ratio(self) -> Solved | None:
        """The most requests for their price."""
        found = self.most_rate()
        for _ in range(ROUNDS):
            if found is None or not found.cost:
                return found
            ratio = found.rate / found.cost
            following = self._solve(self._rate, cost_weight=ratio)
            if following is None or not following.cost or following.rate / following.cost <= ratio * (1 + 1e-9):
                return found
            found = following
        return found

    def _solve(self, gain: Any, cost_weight: float) -> Solved | None:
        terms = [cost_weight * term for term in self._cost]
        self._solver.minimize(sum(terms) - (gain if gain is not None else 0.0))
        if not _optimal(self._solver):
            return None
        values = {key: float(self._solver.val(variable)) for key, variable in self._counts.items()}
        cost = sum(float(self._solver.val(term)) for term in self._cost)
        return Solved(values, float(self._solver.val(self._rate)), cost)

    # ---- constraints ----

    def _count(self, pool: Pool, role: Role) -> Any:
        add = self._solver.addIntegral if self._whole else self._solver.addVariable
        variable = add(0.0, float(pool.most))
        self._counts[pool.name, role] = variable
        self._cost.append(pool.price * variable)
        return variable

    def _prefills(self, cluster: str) -> list[Pool]:
        return [p for p in self._loads.problem.pools if p.cluster == cluster and Role.PREFILL in p.roles and p.most]

    def _able(self, pools: list[Pool]) -> Any:
        """Requests/s that prefill instances of `pools` do."""
        seconds = {p.name: float(self._loads.prefill[p.name].seconds[self._index]) for p in pools}
        return sum(1 / seconds[p.name] * self._count(p, Role.PREFILL) for p in pools if seconds[p.name])

    def _local(self) -> None:
        share = float(self._loads.local[self._index])
        if share <= 1e-12:
            return
        self._need(self._able(self._prefills(self._loads.main)), share * self._headroom * self._rate)

    def _remote(self) -> None:
        share = float(self._loads.offloaded[self._index])
        if share <= 1e-12:
            return
        flows = [self._flow(cluster) for cluster in self._loads.remote]
        self._need(sum(flows), share * self._rate)

    def _flow(self, cluster: str) -> Any:
        """Requests/s that `cluster` prefills."""
        pools = self._prefills(cluster)
        wire = self._loads.problem.wire(cluster, self._loads.main)
        assert wire is not None
        size = max((float(self._loads.prefill[p.name].size[self._index]) for p in pools), default=0.0)
        most = wire.usable / size / self._headroom if size else MOST_RATE
        flow = self._solver.addVariable(0.0, min(most, MOST_RATE))
        self._need(self._able(pools), self._headroom * flow)
        if wire.price:
            self._cost.append(size * wire.wire_ratio * wire.price * HOUR * flow)
        return flow

    def _decode(self) -> None:
        rates = {}
        for pool in self._loads.problem.pools:
            if pool.cluster == self._loads.main and Role.DECODE in pool.roles and pool.most:
                batch = decode_batch(self._loads, pool.name)
                rates[pool] = min(full_rate(pool.profile, self._loads.decoding, batch), MOST_RATE)
        self._need(sum(rate * self._count(pool, Role.DECODE) for pool, rate in rates.items()), self._rate)

    def _inventory(self) -> None:
        for pool in self._loads.problem.pools:
            used = [variable for (name, _), variable in self._counts.items() if name == pool.name]
            if len(used) > 1:
                self._solver.addConstr(sum(used) <= float(pool.most))

    def _need(self, able: Any, needed: Any) -> None:
        self._solver.addConstr(able - needed >= 0.0)


def _module() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise ConfigError(
            f"plan: so many instances need HiGHS ({error}): pip install 'pdrelay[plan]', or lower the pools' counts"
        ) from error
    return highspy


def _solver() -> Any:
    with _silence():
        solver = _module().Highs()
    solver.silent()
    solver.setOptionValue("mip_rel_gap", 1e-4)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", 0.5)
    return solver


@contextmanager
def _silence() -> Iterator[None]:
    """The first solver of a process writes its version to file descriptor 1, whatever its options say."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _optimal(solver: Any) -> bool:
    status = solver.getModelStatus()
    return bool(status == _module().HighsModelStatus.kOptimal) and math.isfinite(solver.getObjectiveValue())
