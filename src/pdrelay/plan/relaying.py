"""The line after prefill, and the relay that hides it.

KV leaves while prefill goes on, so what is left at its end is its last chunk, or what a slow line has not carried by
then. A relay decodes meanwhile: it holds the request for that time, makes tokens that main decode need not make, and
main decode computes their KV in one forward when it takes over (the cost of the handoff).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.arrays import kv_sizes
from pdrelay.perf.batch import Decoding, largest_batch
from pdrelay.perf.lengths import Array
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan, Pool, Wire


class Relay(NamedTuple):
    """The relays of one remote cluster."""

    slots: float  # requests that they hold at once
    step: float  # seconds, half full
    pool: Pool


def after_prefill(pool: Pool, wire: Wire | None, missing: Array, seconds: Array, used: float) -> Array:
    """Seconds from the end of prefill until the KV of `missing` tokens is across, by request.

    `used` is the share of the line that the traffic takes; all transfers share its rate equally.
    """
    if wire is None:
        return np.zeros_like(seconds)
    if used >= 1:
        return np.full_like(seconds, math.inf)
    profile, ratio = pool.profile, wire.wire_ratio
    size = kv_sizes(profile, missing) * ratio
    speed = min(wire.rate * (1 - used), wire.connection_rate)
    last = np.minimum(size, (profile.kv_per_token * profile.prefill_chunk + profile.kv_fixed) * ratio)
    hidden = seconds * (1 - np.divide(last, size, out=np.ones_like(size), where=size > 0))
    after: Array = np.maximum(last / speed, size / speed - hidden) + np.where(size > 0, wire.rtt / 2, 0.0)
    return after


def relay_of(loads: Loads, plan: Plan, cluster: str) -> Relay | None:
    """The relays beside the prefill of `cluster`; None where there is none."""
    slots, step, last = 0.0, 0.0, None
    for pool in loads.problem.pools:
        count = plan.of(pool.name, Role.RELAY)
        if pool.cluster == cluster and count:
            batch = max(1, largest_batch(pool.profile, loads.decoding))
            slots += count * batch
            half = max(1, batch // 2)
            step = max(step, pool.profile.decode_step_seconds(half, half * loads.decoding.context))
            last = pool
    return Relay(slots, step, last) if last is not None else None


def work_with_relays(loads: Loads, plan: Plan, shares: Mapping[str, float], index: int = 0) -> Decoding:
    """What is left for main decode of a request on average, when lines are idle.

    `shares` are the remote clusters' parts of the offloaded requests.
    """
    work = loads.decoding
    if not plan.hit_threshold or not work.steps:
        return work
    lengths = loads.problem.lengths
    goes, low = loads.goes(index), loads.low(plan.hit_threshold)
    steps = np.maximum(lengths.output - 1, 0.0)
    saved = extend = 0.0
    for cluster, share in shares.items():
        relay = relay_of(loads, plan, cluster)
        if relay is None:
            continue
        pool = next(p for p in loads.problem.pools if p.cluster == cluster and plan.of(p.name, Role.PREFILL))
        wire = loads.problem.wire(cluster, plan.main)
        after = after_prefill(pool, wire, loads.missing, loads.seconds[pool.name], 0.0)
        made = np.where(goes & low, np.minimum(steps, after / max(relay.step, 1e-9)), 0.0)
        saved += share * lengths.mean(made)
        extend += share * lengths.mean(_extend(loads, plan, made))
    return work._replace(steps=max(0.0, work.steps - saved), extend=extend)


def relay_capacity(loads: Loads, plan: Plan, shares: Mapping[str, float], index: int = 0) -> tuple[float, float]:
    """Share of all requests that relays may serve, and the tokens/s that full relays make."""
    if not plan.hit_threshold:
        return 0.0, 0.0
    low = float(loads.problem.lengths.weight @ (loads.goes(index) & loads.low(plan.hit_threshold)))
    relayed = tokens = 0.0
    for cluster, share in shares.items():
        if relay_of(loads, plan, cluster) is None:
            continue
        relayed += share * low
        for pool in loads.problem.pools:
            count = plan.of(pool.name, Role.RELAY)
            if pool.cluster == cluster and count:
                batch = max(1, largest_batch(pool.profile, loads.decoding))
                tokens += count * batch / pool.profile.decode_step_seconds(batch, batch * loads.decoding.context)
    return relayed, tokens


def _extend(loads: Loads, plan: Plan, made: Array) -> Array:
    """Seconds of main decode to compute the KV of the relay's tokens; the weights are read with a step anyway."""
    pool = next((p for p in loads.problem.pools if plan.of(p.name, Role.DECODE)), None)
    if pool is None:
        return np.zeros_like(made)
    cost = pool.profile.extend
    pairs = made * loads.problem.lengths.prompt + made * (made + 1) / 2
    seconds: Array = cost.per_token * made + cost.per_pair * pairs
    return seconds
