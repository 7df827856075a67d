"""How long the planner takes: the grid of PrfaaS's Table 6, and a plan over a thousand instances.

The grid's peer is the same search as two nested loops over the scalar equations, as the paper describes it. The
limits are our own: a grid in under 100 ms, a plan over 3 clusters, 4 chips and 1,000 instances in under 10 s.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pdrelay.perf.catalog import find_instance
from pdrelay.perf.lengths import lognormal
from pdrelay.plan.grid import Grid
from pdrelay.plan.optimise import optimise
from pdrelay.plan.problem import Pool, Problem, Promise, Wire
from pdrelay.reproduce.prfaas import whole_grid
from pdrelay.reproduce.prfaas_setup import LINE, LOCAL_INSTANCES, OUTPUT, REMOTE_INSTANCES, problem

GRID_LIMIT, PLAN_LIMIT = 0.1, 10.0
REPEATED = 5
LOOPED = 40
"""Thresholds of the nested loops, whose time is then taken for all of them."""


class Timed(NamedTuple):
    """Seconds, medians."""

    grid: float
    points: int
    looped: float  # the same points, one after the other
    plan: float
    instances: int
    method: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "ratio": self.looped / self.grid, "grid_limit": GRID_LIMIT, "plan_limit": PLAN_LIMIT}


def measure(*, quick: bool = False) -> Timed:
    """Times everything in this process."""
    whole_grid()  # the files of the catalog are read once
    grid = _median(whole_grid, 1 if quick else REPEATED)
    found = whole_grid()
    case = large()
    started = time.perf_counter()
    planned = optimise(case)
    plan = time.perf_counter() - started
    return Timed(grid, found.total.size, _looped(found), plan, sum(p.most for p in case.pools), planned.method)


def large() -> Problem:
    """Three clusters, four kinds of instances in each, a thousand in all; every line is priced."""
    h200, h20 = find_instance("prfaas-1t-h200").profile(), find_instance("prfaas-1t-h20").profile()
    kinds = {"h200": (h200, 10.08), "h20": (h20, 4.99), "a": (h200.scaled("a", 0.5, 0.4), 3.6),
             "e": (h200.scaled("e", 0.7, 2.1), 8.0)}  # fmt: skip
    pools = tuple(
        Pool(f"{kind}-{cluster}", cluster, replace(profile, price=price), count)
        for cluster, count in (("a", 83), ("b", 83), ("c", 84))
        for kind, (profile, price) in kinds.items()
    )
    wires = {(a, b): Wire(LINE, 0.02, 256, price=1e-12) for a in "abc" for b in "abc" if a != b}
    lengths = lognormal(9.90, 1.00, 128, 131_072, OUTPUT)
    return Problem(pools, wires, lengths, Promise(ttft=8.0, tpot=0.05))


def _median(run: Any, repeated: int) -> float:
    times = []
    for _ in range(repeated):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _looped(grid: Grid) -> float:
    """Seconds of all points, from those of some thresholds."""
    case = problem()
    h200, h20 = (pool.profile for pool in case.pools)
    pairs = list(zip(case.lengths.prompt.tolist(), case.lengths.weight.tolist(), strict=True))
    chosen = grid.thresholds[:: max(1, len(grid.thresholds) // LOOPED)].tolist()
    started = time.perf_counter()
    for threshold in chosen:
        share = sum(w for n, w in pairs if n > threshold)
        if not 0 < share < 1:
            continue
        long = sum(n * w for n, w in pairs if n > threshold) / share
        short = sum(n * w for n, w in pairs if n <= threshold) / (1 - share)
        offload = min(REMOTE_INSTANCES / h200.prefill_seconds(long), LINE / h200.kv_bytes(long))
        for prefills in range(LOCAL_INSTANCES):
            decode = (LOCAL_INSTANCES - prefills) * h20.max_num_seqs / (h20.decode.fixed * OUTPUT)
            min(offload / share, prefills / h20.prefill_seconds(short) / (1 - share), decode)
    return (time.perf_counter() - started) * len(grid.thresholds) / len(chosen)
