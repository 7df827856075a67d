"""PrfaaS's throughput model: equations (1) to (8) of section 3.4, over scalars or arrays alike.

Rates are in requests a second, sizes in bytes, line rates in bytes a second. A mean length can be put in (the paper's
representative lengths), or a mean time over the lengths' distribution: the rate of n servers is n by the mean time.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pdrelay.perf.lengths import Array

Value = TypeVar("Value", float, Array)


def kv_throughput(size: Value, prefill: Value) -> Value:
    """Equation (1): bytes of KV a second that one instance makes."""
    return size / prefill


def egress_demand(instances: float, size: Value, prefill: Value) -> Value:
    """Equation (2): bytes a second that leave a prefill cluster whose instances are all busy."""
    return instances * kv_throughput(size, prefill)


def compute_rate(instances: Array | float, prefill: Array | float) -> Array:
    """Equation (4), and the first term of (3): prefills a second; without bound where there is nothing to do."""
    return _divided(instances, prefill)


def offload_rate(instances: Array | float, prefill: Array | float, line: float, size: Array | float) -> Array:
    """Equation (3): prefill and line overlap layer by layer, so the slower of the two sets the rate."""
    rate: Array = np.minimum(compute_rate(instances, prefill), _divided(line, size))
    return rate


def decode_rate(instances: Array | float, batch: Array | float, step: Array | float, output: Array | float) -> Array:
    """Equation (5): requests a second of decode instances that run `batch` sequences in steps of `step` seconds."""
    return _divided(np.multiply(instances, batch), np.multiply(step, output))


def system_rate(offload: Array, offloaded: Array | float, local: Array, decode: Array | float) -> Array:
    """Equation (6): requests a second, `offloaded` (p) of which go to the remote prefill cluster."""
    share = np.asarray(offloaded, dtype=np.float64)
    rate: Array = np.minimum(np.minimum(of_share(offload, share), of_share(local, 1 - share)), decode)
    return rate


def of_share(rate: Array, share: Array | float) -> Array:
    """The rate of all requests at which a stage of `rate` is full that sees `share` of them."""
    seen = np.asarray(share, dtype=np.float64)
    return _divided(rate, np.where(seen > 1e-12, seen, 0.0))


def routing_imbalance(offload: Array, offloaded: Array | float, local: Array) -> Array:
    """Equation (7) as a difference of logarithms: 0 at the best threshold, above 0 where it could be lower."""
    imbalance: Array = np.log(of_share(offload, offloaded)) - np.log(of_share(local, 1 - np.asarray(offloaded)))
    return imbalance


def role_imbalance(offload: Array, local: Array, decode: Array | float) -> Array:
    """Equation (8) likewise: 0 at the best split of local instances, above 0 where more of them should decode."""
    imbalance: Array = np.log(offload + local) - np.log(np.asarray(decode, dtype=np.float64))
    return imbalance


def _divided(above: Array | float, below: Array | float) -> Array:
    """Quotients, infinite where there is nothing to divide by."""
    over, under = np.broadcast_arrays(np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64))
    quotient: Array = np.divide(over, under, out=np.full(over.shape, np.inf), where=under > 0)
    return quotient
