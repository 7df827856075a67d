"""Times of a plan at a load: first and second token, per token, with waiting at every stage.

TTFT is the wait for a prefill instance and the prefill, whose sample is the first token. TTST adds what the first token
hides: the rest of the KV's way over the line, the wait for a decode slot and a step; with a relay, the relay's step in
place of the line. Prefill and line overlap, so only what prefill has not hidden counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdrelay.cluster.topology import Role
from pdrelay.perf.arrays import kv_sizes, prefill_times
from pdrelay.perf.batch import Decoding, batch_at
from pdrelay.perf.lengths import Array
from pdrelay.perf.queueing import NO_WAIT, Stream, Wait, average, percentile, share_within, wait
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan, Pool
from pdrelay.plan.rates import cluster_capacity, counts_of, decode_batch, remote_clusters

STANDARD = (0.5, 0.9, 0.99)


class Times(NamedTuple):
    """Seconds. Percentiles are P50, P90 and P99."""

    ttft_mean: float
    ttft: tuple[float, float, float]
    ttst_mean: float
    ttst: tuple[float, float, float]
    tpot: float
    batch: float  # sequences of a decode instance, on average
    good: float  # share of requests that keep the promise, TPOT aside


class Latency:
    """Times of one plan at any rate; what does not depend on the rate is computed once."""

    def __init__(self, loads: Loads, plan: Plan, index: int = 0) -> None:
        self.loads, self.plan, self.index = loads, plan, index
        problem = loads.problem
        lengths = problem.lengths
        here = problem.cached_share(plan.main)
        self._goes = lengths.uncached(here) > plan.threshold
        self._missing = np.maximum(lengths.prompt - here * lengths.cached, 0.0)
        self._low = lengths.cached * here < plan.hit_threshold * lengths.prompt
        self._prefills = counts_of(plan, Role.PREFILL)
        self._pools = {p.name: p for p in problem.pools}

    def waiting(self, rate: float) -> list[tuple[Pool, Array, Array, Wait]]:
        """Every prefill pool in use: its share of each point, seconds of each point's prefill, the wait."""
        found = []
        for cluster, weight, share in self._clusters():
            pools = [p for p in self.loads.problem.pools if p.cluster == cluster and p.name in self._prefills]
            load = [self.loads.prefill[p.name] for p in pools]
            powers = [float(self._prefills[p.name]) / max(float(each.seconds[self.index]), 1e-12)
                      for p, each in zip(pools, load, strict=True)]  # fmt: skip
            for pool, each, power in zip(pools, load, powers, strict=True):
                part = power / sum(powers)
                arriving = rate * share * part
                queue = wait(arriving, float(self._prefills[pool.name]), float(each.seconds[self.index]),
                             float(each.square[self.index]))  # fmt: skip
                found.append((pool, weight * part, self._seconds(pool), queue))
        return found

    def _clusters(self) -> list[tuple[str, Array, float]]:
        """Clusters that prefill, the weight of each point there, their share of all requests."""
        weight = self.loads.problem.lengths.weight
        found = []
        stays = float(self.loads.local[self.index])
        if stays > 1e-12:
            found.append((self.plan.main, weight * ~self._goes, stays))
        goes = float(self.loads.offloaded[self.index])
        names = remote_clusters(self.loads) if goes > 1e-12 else []
        able = [float(cluster_capacity(self.loads, name, self._prefills)[self.index]) for name in names]
        for name, power in zip(names, able, strict=True):
            if power:
                part = power / sum(able)
                found.append((name, weight * self._goes * part, goes * part))
        return found

    def _seconds(self, pool: Pool) -> Array:
        lengths = self.loads.problem.lengths
        share = self.loads.problem.cached_share(pool.cluster)
        return prefill_times(pool.profile, lengths.uncached(share), share * lengths.cached)

    # ---- first token ----

    def first(self, rate: float) -> list[Stream]:
        """Wait and prefill; `rate` 0 gives the paper's definition, prefill alone."""
        return [Stream(weight, seconds, queue) for _, weight, seconds, queue in self.waiting(rate)]

    # ---- second token ----

    def second(self, rate: float) -> list[Stream]:
        """Until the first decoded token."""
        step, slot = self.decode(rate)
        streams = []
        for pool, weight, seconds, queue in self.waiting(rate):
            after = np.zeros_like(seconds)
            if pool.cluster != self.plan.main:
                after = self._line(pool, rate, seconds)
                relayed = self._relayed(pool.cluster)
                after = np.where(relayed, np.minimum(after, self._relay_step(pool.cluster)), after)
            joined = Wait(max(queue.busy, slot.busy), queue.mean + slot.average) if slot.busy else queue
            streams.append(Stream(weight, seconds + after + step, joined))
        return streams

    def _line(self, pool: Pool, rate: float, seconds: Array) -> Array:
        """Seconds from the end of prefill until the KV is there, of each point."""
        wire = self.loads.problem.wire(pool.cluster, self.plan.main)
        if wire is None:
            return np.zeros_like(seconds)
        size = kv_sizes(pool.profile, self._missing) * wire.wire_ratio
        share = next((s for name, _, s in self._clusters() if name == pool.cluster), 0.0)
        mean = float(self.loads.prefill[pool.name].size[self.index]) * wire.wire_ratio
        used = rate * share * mean / min(wire.rate, wire.connections * wire.connection_rate)
        if used >= 1:
            return np.full_like(seconds, math.inf)
        # Transfers share the line: each is slowed down by what the others use, wherever its own cap does not bind.
        speed = min(wire.rate * (1 - used), wire.connection_rate)
        last = np.minimum(size, (pool.profile.kv_per_token * pool.profile.prefill_chunk + pool.profile.kv_fixed)
                          * wire.wire_ratio)  # fmt: skip
        hidden = seconds * (1 - np.divide(last, size, out=np.ones_like(size), where=size > 0))
        after: Array = np.maximum(last / speed, size / speed - hidden) + wire.rtt / 2
        return after

    def _relayed(self, cluster: str) -> npt.NDArray[np.bool_]:
        able = any(self.plan.of(p.name, Role.RELAY) for p in self.loads.problem.pools if p.cluster == cluster)
        return self._low & able

    def _relay_step(self, cluster: str) -> float:
        """A step of a half full relay."""
        steps = []
        for pool in self.loads.problem.pools:
            if pool.cluster == cluster and self.plan.of(pool.name, Role.RELAY):
                batch = max(1, pool.profile.max_num_seqs // 2)
                steps.append(pool.profile.decode_step_seconds(batch, batch * self.loads.decoding.context))
        return min(steps, default=0.0)

    # ---- decode ----

    def decode(self, rate: float) -> tuple[float, Wait]:
        """Seconds of a decode step at `rate`, and the wait for a slot."""
        step, slots, occupied = 0.0, 0.0, 0.0
        work = self.loads.decoding
        if not work.steps:
            return 0.0, NO_WAIT
        decodes = counts_of(self.plan, Role.DECODE)
        pools = [self._pools[name] for name in decodes if self._pools[name].cluster == self.plan.main]
        powers = [float(decodes[p.name]) * _power(p, work, decode_batch(self.loads, p.name)) for p in pools]
        for pool, power in zip(pools, powers, strict=True):
            part = power / sum(powers) if sum(powers) else 0.0
            most = decode_batch(self.loads, pool.name)
            batch = min(batch_at(pool.profile, work, rate * part / float(decodes[pool.name])), float(most))
            step += part * pool.profile.decode_step_seconds(max(1, round(batch)), max(1.0, batch) * work.context)
            slots += float(decodes[pool.name]) * most
            occupied += float(decodes[pool.name]) * batch
        held = work.steps * step
        outputs = self.loads.problem.lengths.output
        square = self.loads.problem.lengths.mean(np.maximum(outputs - 1, 0.0) ** 2) * step**2
        return step, wait(min(rate, occupied / held if held else 0.0), slots, held, square)

    def times(self, rate: float) -> Times:
        """All times at `rate` requests/s, 0 for an idle system."""
        promise = self.loads.problem.promise
        first, second = self.first(rate), self.second(rate)
        step, _ = self.decode(rate)
        good = min(
            share_within(first, promise.ttft) if promise.ttft < math.inf else 1.0,
            share_within(second, promise.ttst) if promise.ttst < math.inf else 1.0,
        )
        return Times(
            average(first), _percentiles(first), average(second), _percentiles(second), step, self.batch(rate), good
        )

    def batch(self, rate: float) -> float:
        """Sequences that a decode instance runs on average."""
        step, _ = self.decode(rate)
        instances = sum(float(n) for n in counts_of(self.plan, Role.DECODE).values())
        return rate * self.loads.decoding.steps * step / instances if instances else 0.0

    def keeps(self, rate: float) -> bool:
        """Whether the promise is kept at `rate`."""
        promise = self.loads.problem.promise
        if promise.ttft < math.inf and share_within(self.first(rate), promise.ttft) < promise.share:
            return False
        if promise.ttst < math.inf and share_within(self.second(rate), promise.ttst) < promise.share:
            return False
        return self.decode(rate)[0] <= promise.tpot * (1 + 1e-6)


def _power(pool: Pool, work: Decoding, batch: int) -> float:
    if not batch:
        return 0.0
    return batch / pool.profile.decode_step_seconds(batch, batch * work.context)


def _percentiles(streams: list[Stream]) -> tuple[float, float, float]:
    p50, p90, p99 = (percentile(streams, share) for share in STANDARD)
    return p50, p90, p99
