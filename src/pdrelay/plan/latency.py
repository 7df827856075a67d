"""Times of a plan at a load: first and second token, per token, with waiting at every stage.

TTFT is the wait for a prefill instance and the prefill, whose sample is the first token. TTST adds what the first token
hides: the rest of the KV's way over the line, the wait for a decode slot and a step; with a relay, the relay's step in
place of the line. Prefill and line overlap, so only what prefill has not hidden counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.batch import Decoding, batch_at
from pdrelay.perf.lengths import Array
from pdrelay.perf.queueing import NO_WAIT, PLACED, Stream, Wait, average, percentile, share_within, wait
from pdrelay.plan.loads import Loads, PrefillLoad
from pdrelay.plan.problem import Plan, Pool
from pdrelay.plan.rates import cluster_size, clusters, counts_of, decode_batch
from pdrelay.plan.relaying import after_prefill, relay_of, work_with_relays

STANDARD = (0.5, 0.9, 0.99)


class Queue(NamedTuple):
    """A prefill pool: the weight of each point there, seconds of its prefill, the wait."""

    pool: Pool
    weight: Array
    seconds: Array
    wait: Wait


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
        self._goes = loads.goes(index)
        self._low = loads.low(plan.hit_threshold)
        self._prefills = counts_of(plan, Role.PREFILL)
        self._clusters = clusters(loads, plan, index)
        shares = {name: share / loads.offloaded[index] for name, share in self._clusters if name != plan.main}
        self._work = work_with_relays(loads, plan, shares, index)

    def waiting(self, rate: float) -> list[Queue]:
        """Every prefill pool in use."""
        found = []
        weight = self.loads.problem.lengths.weight
        for cluster, share in self._clusters:
            here = ~self._goes if cluster == self.plan.main else self._goes
            side = float(weight @ here)
            names = [name for name in self._prefills if self.loads.pool(name).cluster == cluster]
            powers = {name: float(self._prefills[name]) / max(float(self._load(name).seconds[self.index]), 1e-12)
                      for name in names}  # fmt: skip
            for name, power in powers.items():
                part = power / sum(powers.values()) * share
                load = self._load(name)
                queue = wait(rate * part, float(self._prefills[name]), float(load.seconds[self.index]),
                             float(load.square[self.index]), PLACED)  # fmt: skip
                points = weight * here * (part / side) if side else np.zeros_like(weight)
                found.append(Queue(self.loads.pool(name), points, self.loads.seconds[name], queue))
        return found

    def _load(self, name: str) -> PrefillLoad:
        return self.loads.prefill[name]

    # ---- first token ----

    def first(self, rate: float) -> list[Stream]:
        """Wait and prefill; `rate` 0 gives the paper's definition, prefill alone."""
        return [Stream(each.weight, each.seconds, each.wait) for each in self.waiting(rate)]

    # ---- second token ----

    def second(self, rate: float) -> list[Stream]:
        """Until the first decoded token."""
        step, slot = self.decode(rate)
        streams = []
        for pool, weight, seconds, queue in self.waiting(rate):
            joined = Wait(max(queue.busy, slot.busy), queue.mean + slot.average) if slot.busy else queue
            if pool.cluster == self.plan.main:
                streams.append(Stream(weight, seconds + step, joined))
                continue
            after = self._after(pool, rate)
            relayed, relay_step = self._relayed(pool.cluster, weight, after, rate)
            streams.append(Stream(weight * (1 - relayed), seconds + after + step, joined))
            if relayed.any():
                streams.append(Stream(weight * relayed, seconds + np.minimum(after, relay_step), queue))
        return streams

    def _after(self, pool: Pool, rate: float) -> Array:
        """Seconds from the end of prefill until the KV is there, of each point."""
        wire = self.loads.problem.wire(pool.cluster, self.plan.main)
        share = next((share for name, share in self._clusters if name == pool.cluster), 0.0)
        size = cluster_size(self.loads, pool.cluster, self._prefills, self.index)
        used = rate * share * size / wire.usable if wire is not None else 0.0
        return after_prefill(pool, wire, self.loads.missing, self.loads.seconds[pool.name], used)

    def _relayed(self, cluster: str, weight: Array, after: Array, rate: float) -> tuple[Array, float]:
        """The part of each point that a relay serves: all low hits while it has room."""
        relay = relay_of(self.loads, self.plan, cluster)
        if relay is None:
            return np.zeros_like(weight), 0.0
        held = rate * float(weight @ np.where(self._low, np.minimum(after, 1e6), 0.0))
        room = min(1.0, relay.slots / held) if held else 1.0
        relayed: Array = np.where(self._low, room, 0.0)
        return relayed, relay.step

    # ---- decode ----

    def decode(self, rate: float) -> tuple[float, Wait]:
        """Seconds of a decode step at `rate`, and the wait for a slot."""
        step, slots, occupied = 0.0, 0.0, 0.0
        work = self._work
        if not work.steps:
            return 0.0, NO_WAIT
        decodes = counts_of(self.plan, Role.DECODE)
        pools = [self.loads.pool(name) for name in decodes if self.loads.pool(name).cluster == self.plan.main]
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
        return rate * self._work.steps * step / instances if instances else 0.0

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
