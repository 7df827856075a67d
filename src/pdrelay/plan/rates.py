"""How many requests a second each stage of a plan carries, which one binds, and what its bytes cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.batch import Decoding, full_rate, largest_batch
from pdrelay.perf.lengths import Array
from pdrelay.perf.stages import compute_rate, of_share, system_rate
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan
from pdrelay.plan.relaying import relay_capacity, work_with_relays

LOCAL_PREFILL, REMOTE_PREFILL, DECODE = "local prefill", "remote prefill", "decode"

Counted = dict[str, Array]
"""Instances by pool name, as arrays that broadcast against the thresholds."""


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
    return largest_batch(loads.pool(pool).profile, loads.decoding, loads.problem.promise.tpot)


def decode_capacity(loads: Loads, counts: Counted, work: Decoding | None = None) -> Array:
    """Requests/s of decode instances (equation 5); `work` is what is left of a request when relays help."""
    total: Array = np.zeros(1)
    for name, count in counts.items():
        pool = loads.pool(name)
        if pool.cluster == loads.main:
            rate = full_rate(pool.profile, work or loads.decoding, decode_batch(loads, name))
            total = total + _times(count, rate)
    return total


def local_capacity(loads: Loads, counts: Counted) -> Array:
    """Requests/s of prefill beside main decode (equation 4)."""
    return _prefills(loads, loads.main, counts)


def offload_capacity(loads: Loads, counts: Counted) -> Array:
    """Requests/s of all remote clusters (equation 3): of each the lesser of its instances and its line."""
    total: Array = np.zeros(loads.thresholds.shape)
    for cluster in loads.remote:
        total = total + cluster_capacity(loads, cluster, counts)
    return total


def cluster_capacity(loads: Loads, cluster: str, counts: Counted) -> Array:
    """Requests/s of one remote cluster and its line."""
    limited: Array = np.minimum(_prefills(loads, cluster, counts), line_capacity(loads, cluster, counts))
    return limited


def line_capacity(loads: Loads, cluster: str, counts: Counted) -> Array:
    """Requests/s that the line from `cluster` carries."""
    wire = loads.problem.wire(cluster, loads.main)
    size = np.zeros(loads.thresholds.shape)
    for name in counts:
        if loads.pool(name).cluster == cluster:
            size = np.maximum(size, loads.prefill[name].size)
    return compute_rate(wire.usable if wire is not None else 0.0, size)


def _prefills(loads: Loads, cluster: str, counts: Counted) -> Array:
    total: Array = np.zeros(loads.thresholds.shape)
    for name, count in counts.items():
        if loads.pool(name).cluster == cluster:
            total = total + _times(count, compute_rate(1.0, loads.prefill[name].seconds))
    return total


def _times(count: Array, rate: Array | float) -> Array:
    """Rate of `count` instances: none has none, even where one would have no bound."""
    able: Array = np.where(count > 0, np.where(count > 0, count, 1.0) * rate, 0.0)
    return able


def counts_of(plan: Plan, role: Role) -> Counted:
    """A plan's instances of one role."""
    return {name: np.array(float(count)) for (name, each), count in plan.counts.items() if each is role and count}


def rates(loads: Loads, plan: Plan, index: int = 0) -> Rates:
    """The rates of `plan`; `loads` are for its main cluster, with its threshold at `index`."""
    prefills = counts_of(plan, Role.PREFILL)
    offload = float(offload_capacity(loads, prefills)[index])
    local = float(local_capacity(loads, prefills)[index])
    decode = _with_relays(loads, plan, index)
    share = float(loads.offloaded[index])
    total = float(system_rate(np.array([offload]), share, np.array([local]), decode)[0])
    full = {
        REMOTE_PREFILL: float(of_share(np.array(offload), share)),
        LOCAL_PREFILL: float(of_share(np.array(local), 1 - share)),
        DECODE: decode,
    }
    first = min(full, key=lambda name: full[name])
    if first == REMOTE_PREFILL:
        first = _full_line(loads, prefills, index) or first
    sizes = [cluster_size(loads, cluster, prefills, index) for cluster in loads.remote]
    return Rates(offload, local, decode, share, total, first, total * share * max(sizes, default=0.0))


def _with_relays(loads: Loads, plan: Plan, index: int) -> float:
    """Decode rate: while main decode is full, relays keep their requests as long as they have room."""
    shares = _shares(loads, counts_of(plan, Role.PREFILL), index)
    work = loads.decoding._replace(extend=work_with_relays(loads, plan, shares, index).extend)
    main = float(decode_capacity(loads, counts_of(plan, Role.DECODE), work)[0])
    relayed, tokens = relay_capacity(loads, plan, shares, index)
    if not tokens or not work.steps:
        return main
    return min(main + tokens / work.steps, main / max(1 - relayed, 1e-9))


def clusters(loads: Loads, plan: Plan, index: int = 0) -> list[tuple[str, float]]:
    """Clusters that prefill, with their share of all requests. Remote ones share by what they can do."""
    found = []
    if loads.local[index] > 1e-12:
        found.append((loads.main, float(loads.local[index])))
    share = float(loads.offloaded[index])
    return [*found, *((c, share * part) for c, part in _shares(loads, counts_of(plan, Role.PREFILL), index).items())]


def egress_price(loads: Loads, plan: Plan, index: int = 0) -> float:
    """Price of the bytes that one request sends over priced lines, on average."""
    prefills = counts_of(plan, Role.PREFILL)
    price = 0.0
    for cluster, share in clusters(loads, plan, index):
        wire = loads.problem.wire(cluster, loads.main)
        if wire is not None and cluster != loads.main:
            price += share * cluster_size(loads, cluster, prefills, index) * wire.wire_ratio * wire.price
    return price


def cluster_size(loads: Loads, cluster: str, prefills: Counted, index: int) -> float:
    """Bytes of KV of a request that `cluster` prefills."""
    sizes = [float(loads.prefill[name].size[index]) for name in prefills if loads.pool(name).cluster == cluster]
    return max(sizes, default=0.0)


def _shares(loads: Loads, prefills: Counted, index: int) -> dict[str, float]:
    """Remote clusters by their part of the offloaded requests."""
    if loads.offloaded[index] <= 1e-12:
        return {}
    able = {c: float(cluster_capacity(loads, c, prefills)[index]) for c in loads.remote}
    total = sum(able.values())
    return {cluster: power / total for cluster, power in able.items() if power} if total else {}


def _full_line(loads: Loads, prefills: Counted, index: int) -> str:
    """The line that limits a remote cluster, empty where instances do."""
    for cluster in loads.remote:
        line = float(line_capacity(loads, cluster, prefills)[index])
        if line < float(_prefills(loads, cluster, prefills)[index]):
            return f"line from {cluster}"
    return ""
