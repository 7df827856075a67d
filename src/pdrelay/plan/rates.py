"""How many requests a second each stage of a plan carries, which one binds, and what that costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.batch import full_rate, largest_batch
from pdrelay.perf.lengths import Array
from pdrelay.perf.stages import compute_rate, offload_rate, system_rate
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan


class Rates(NamedTuple):
    """Requests/s of the stages (Theta of the paper) and of the whole (Lambda)."""

    offload: float  # of the remote prefill clusters, their lines included
    local: float
    decode: float
    offloaded: float  # share of requests, p
    total: float
    binding: str  # the stage that is full first
    egress: float  # bytes/s of KV at the total rate, before coding


def decode_batch(loads: Loads, pool: str) -> int:
    """Sequences of one instance of `pool` within the promised time per token."""
    profile = next(p.profile for p in loads.problem.pools if p.name == pool)
    return largest_batch(profile, loads.decoding, loads.problem.promise.tpot)


def decode_capacity(loads: Loads, counts: dict[str, Array]) -> Array:
    """Requests/s of decode instances, by pool name."""
    total: Array = np.zeros(1)
    for pool in loads.problem.pools:
        if pool.name in counts and pool.cluster == loads.main:
            rate = full_rate(pool.profile, loads.decoding, decode_batch(loads, pool.name))
            total = total + np.where(counts[pool.name] > 0, counts[pool.name] * rate, 0.0)
    return total


def local_capacity(loads: Loads, counts: dict[str, Array]) -> Array:
    """Requests/s of prefill beside main decode (equation 4); counts broadcast against the thresholds."""
    total: Array = np.zeros(loads.thresholds.shape)
    for pool in loads.problem.pools:
        if pool.name in counts and pool.cluster == loads.main:
            rate = compute_rate(1.0, loads.prefill[pool.name].seconds)
            total = total + np.where(counts[pool.name] > 0, counts[pool.name] * rate, 0.0)
    return total


def offload_capacity(loads: Loads, counts: dict[str, Array]) -> Array:
    """Requests/s of all remote clusters (equation 3): of each the lesser of its instances and its line."""
    total: Array = np.zeros(loads.thresholds.shape)
    for cluster in remote_clusters(loads):
        total = total + cluster_capacity(loads, cluster, counts)
    return total


def cluster_capacity(loads: Loads, cluster: str, counts: dict[str, Array]) -> Array:
    """Requests/s of one remote cluster and its line; 0 without a line or instances."""
    wire = loads.problem.wire(cluster, loads.main)
    total: Array = np.zeros(loads.thresholds.shape)
    if wire is None:
        return total
    size = total
    for pool in loads.problem.pools:
        if pool.name in counts and pool.cluster == cluster:
            load = loads.prefill[pool.name]
            size = np.maximum(size, load.size)
            rate = compute_rate(1.0, load.seconds)
            total = total + np.where(counts[pool.name] > 0, counts[pool.name] * rate, 0.0)
    # Instances of unlike pools add up before the line limits them together.
    limited: Array = np.minimum(total, offload_rate(np.inf, 1.0, wire.usable, size))
    return limited


def remote_clusters(loads: Loads) -> list[str]:
    """Clusters that can prefill for the main cluster."""
    return [c for c in loads.problem.clusters(Role.PREFILL) if c != loads.main and loads.problem.wire(c, loads.main)]


def counts_of(plan: Plan, role: Role) -> dict[str, Array]:
    """A plan's instances of one role as arrays."""
    return {name: np.array(float(count)) for (name, each), count in plan.counts.items() if each is role and count}


def rates(loads: Loads, plan: Plan, index: int = 0) -> Rates:
    """The rates of `plan`; `loads` are for its main cluster, its threshold at `index`."""
    prefills = counts_of(plan, Role.PREFILL)
    offload = float(offload_capacity(loads, prefills)[index])
    local = float(local_capacity(loads, prefills)[index])
    decode = float(decode_capacity(loads, counts_of(plan, Role.DECODE))[0])
    share = float(loads.offloaded[index])
    total = float(system_rate(np.array([offload]), share, np.array([local]), decode)[0])
    return Rates(
        offload, local, decode, share, total, binding(loads, plan, share, (offload, local, decode), index),
        total * share * _mean_size(loads, prefills, index),
    )  # fmt: skip


def binding(loads: Loads, plan: Plan, share: float, stages: tuple[float, float, float], index: int) -> str:
    """The stage that is full first; of offloading, whether instances or the line are."""
    offload, local, decode = stages
    full = {
        "offload": offload / share if share > 1e-12 else np.inf,
        "local prefill": local / (1 - share) if share < 1 - 1e-12 else np.inf,
        "decode": decode,
    }
    first = min(full, key=lambda name: full[name])
    if first != "offload":
        return first
    prefills = counts_of(plan, Role.PREFILL)
    for cluster in remote_clusters(loads):
        wire = loads.problem.wire(cluster, loads.main)
        limited = float(cluster_capacity(loads, cluster, prefills)[index])
        size = max((float(loads.prefill[p.name].size[index]) for p in loads.problem.pools
                    if p.cluster == cluster and p.name in prefills), default=0.0)  # fmt: skip
        if wire is not None and size and limited and limited >= wire.usable / size * (1 - 1e-9):
            return f"line from {cluster}"
    return "remote prefill"


def _mean_size(loads: Loads, prefills: dict[str, Array], index: int) -> float:
    """Bytes of KV of an offloaded request."""
    sizes = [float(loads.prefill[p.name].size[index]) for p in loads.problem.pools
             if p.name in prefills and p.cluster != loads.main]  # fmt: skip
    return max(sizes, default=0.0)
