"""What each stage has to do for one request, by threshold: the coefficients of every plan with one main cluster.

Everything is computed for all thresholds at once; a plan is then a few divisions (plan/rates.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdrelay.cluster.topology import Role
from pdrelay.perf.arrays import kv_sizes, prefill_times
from pdrelay.perf.batch import Decoding
from pdrelay.perf.lengths import Array, Lengths, Parted
from pdrelay.plan.problem import Mode, Pool, Problem


class PrefillLoad(NamedTuple):
    """Of one pool, by threshold: mean seconds of a prefill, and of its square; bytes that its KV adds to the line."""

    seconds: Array
    square: Array
    size: Array


class Loads:
    """Coefficients for one main cluster and some thresholds."""

    def __init__(self, problem: Problem, main: str, thresholds: Array, mode: Mode = "distribution") -> None:
        self.problem, self.main, self.mode = problem, main, mode
        self.thresholds = thresholds
        self._pools = {pool.name: pool for pool in problem.pools}
        lengths = problem.lengths
        here = problem.cached_share(main)
        self._parted = Parted(lengths.uncached(here), lengths.weight, thresholds)
        self.offloaded, self.local = self._parted.goes, self._parted.stays
        self.missing = np.maximum(lengths.prompt - here * lengths.cached, 0.0)
        """Tokens whose KV main decode lacks, of each point."""
        self._here = lengths.uncached(here)
        self.seconds: dict[str, Array] = {}
        """Seconds of each point's prefill, by pool."""
        self.prefill = {p.name: self._prefill(p) for p in problem.pools if Role.PREFILL in p.roles}
        self.decoding = decoding(lengths, mode)
        self.remote = [c for c in problem.clusters(Role.PREFILL) if c != main and problem.wire(c, main) is not None]
        """Clusters that can prefill for the main one."""
        self.offloaded_length = self._parted.mean_of_go(lengths.uncached(here))
        self.local_length = self._parted.mean_of_stay(lengths.uncached(here))

    def pool(self, name: str) -> Pool:
        """The pool called `name`."""
        return self._pools[name]

    def goes(self, index: int) -> npt.NDArray[np.bool_]:
        """Points that are offloaded."""
        goes: npt.NDArray[np.bool_] = self._here > self.thresholds[index]
        return goes

    def low(self, hit_threshold: float) -> npt.NDArray[np.bool_]:
        """Points whose hit rate at main decode is below H."""
        lengths = self.problem.lengths
        low: npt.NDArray[np.bool_] = (
            self.problem.cached_share(self.main) * lengths.cached < hit_threshold * lengths.prompt
        )
        return low

    def _prefill(self, pool: Pool) -> PrefillLoad:
        lengths = self.problem.lengths
        share = self.problem.cached_share(pool.cluster)
        uncached, cached = lengths.uncached(share), share * lengths.cached
        mean = self._parted.mean_of_stay if pool.cluster == self.main else self._parted.mean_of_go
        times = self.seconds[pool.name] = prefill_times(pool.profile, uncached, cached)
        if self.mode == "representative":
            seconds = prefill_times(pool.profile, mean(uncached), mean(cached))
            size = kv_sizes(pool.profile, mean(self.missing))
        else:
            seconds, size = mean(times), mean(kv_sizes(pool.profile, self.missing))
        return PrefillLoad(seconds, mean(times**2), size)


def decoding(lengths: Lengths, mode: Mode) -> Decoding:
    """What a request asks of decode when no relay helps.

    Prefill makes the first token. The paper counts all output tokens as decoded, and mean lengths.
    """
    prompt, output = lengths.mean(lengths.prompt), lengths.mean(lengths.output)
    if mode == "representative":
        return Decoding(output, prompt + output / 2, prompt)
    steps = np.maximum(lengths.output - 1, 0.0)
    total = lengths.mean(steps)
    if not total:
        return Decoding(0.0, prompt, prompt)
    # A sequence is seen in proportion to how long it runs.
    context = lengths.mean(steps * (lengths.prompt + 1 + steps / 2)) / total
    # The longer a prompt the longer it waits for memory: whoever is next in line is long.
    return Decoding(total, context, lengths.mean(lengths.prompt**2) / prompt)
