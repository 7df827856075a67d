"""Exhaustive search over the threshold and the split of local instances: the paper's two-dimensional grid.

Source: PrfaaS, section 3.4.2 and Figure 5. One remote pool offloads, one local pool prefills and decodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.lengths import Array
from pdrelay.perf.stages import of_share, system_rate
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import LOCAL_ONLY, Mode, Plan, Problem
from pdrelay.plan.rates import Rates, decode_capacity, local_capacity, offload_capacity, rates

THRESHOLDS = 1200


class Grid(NamedTuple):
    """Rates of every point: rows are local prefill instances, columns thresholds."""

    thresholds: Array  # tokens
    prefills: Array  # local prefill instances
    decodes: Array  # local decode instances
    offload: Array  # requests/s by threshold
    offloaded: Array  # share by threshold
    local: Array  # requests/s by row and threshold
    decode: Array  # requests/s by row
    total: Array  # requests/s by row and threshold

    @property
    def best(self) -> tuple[int, int]:
        """Row and column of the highest rate."""
        row, column = np.unravel_index(int(self.total.argmax()), self.total.shape)
        return int(row), int(column)

    def by_split(self, column: int) -> tuple[Array, Array, Array]:
        """Figure 5a at one threshold: the prefill bound, the decode bound and the rate by row."""
        share = self.offloaded[column]
        upstream = np.minimum(of_share(self.offload[column : column + 1], share), of_share(self.local[:, column],
                                                                                            1 - share))  # fmt: skip
        return upstream, self.decode, self.total[:, column]

    def by_threshold(self, row: int) -> tuple[Array, Array, Array]:
        """Figure 5b at one split: what offloading and local prefill bound the rate to, and the rate, by threshold."""
        return of_share(self.offload, self.offloaded), of_share(self.local[row], 1 - self.offloaded), self.total[row]


def thresholds_of(problem: Problem, main: str, count: int = THRESHOLDS) -> Array:
    """Thresholds worth trying: evenly spaced in the logarithm over the uncached lengths."""
    uncached = problem.lengths.uncached(problem.cached_share(main))
    least, most = float(uncached.min()), float(uncached.max())
    return np.geomspace(least, most, count) if most > least else np.array([least])


def search(
    problem: Problem, main: str, local: str, instances: int, remote: dict[str, int], mode: Mode = "distribution",
    thresholds: Array | None = None,
) -> Grid:  # fmt: skip
    """All splits of `instances` of pool `local`, with `remote` instances by pool, at all thresholds.

    Without `remote` nothing is offloaded.
    """
    chosen = thresholds if thresholds is not None else thresholds_of(problem, main)
    loads = Loads(problem, main, chosen if remote else np.array([LOCAL_ONLY]), mode)
    prefills = np.arange(0 if remote else 1, instances, dtype=np.float64)
    decodes = instances - prefills
    offload = offload_capacity(loads, {name: np.array(float(count)) for name, count in remote.items()})
    one = local_capacity(loads, {local: np.array(1.0)})
    here = np.where(prefills[:, None] > 0, prefills[:, None] * one[None, :], 0.0)
    decode = np.array(decode_capacity(loads, {local: decodes}))
    total = system_rate(np.broadcast_to(offload, here.shape), np.broadcast_to(loads.offloaded, here.shape), here,
                        decode[:, None])  # fmt: skip
    return Grid(loads.thresholds, prefills, decodes, offload, loads.offloaded, here, decode, total)


def best_plan(
    problem: Problem, main: str, local: str, instances: int, remote: dict[str, int], mode: Mode = "distribution"
) -> tuple[Plan, Rates, Grid]:  # fmt: skip
    """The best point of the grid as a plan, its rates, and the grid."""
    grid = search(problem, main, local, instances, remote, mode)
    row, column = grid.best
    counts = {(local, Role.PREFILL): int(grid.prefills[row]), (local, Role.DECODE): int(grid.decodes[row])}
    counts |= {(name, Role.PREFILL): count for name, count in remote.items()}
    plan = Plan(main, float(grid.thresholds[column]), counts)
    loads = Loads(problem, main, grid.thresholds[column : column + 1], mode)
    return plan, rates(loads, plan), grid
