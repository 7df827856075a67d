"""An instance's times for many requests at once; the same numbers as `InstanceProfile` gives for one."""

from __future__ import annotations

import numpy as np

from pdrelay.perf.instance import InstanceProfile, PrefillTable
from pdrelay.perf.lengths import Array


def prefill_times(profile: InstanceProfile, uncached: Array, cached: Array | float = 0.0) -> Array:
    """Seconds to prefill `uncached` tokens behind `cached` ones, elementwise; 0 for no token."""
    cost = profile.prefill
    if isinstance(cost, PrefillTable):
        return _table(cost, uncached) + cost.per_pair * uncached * cached
    pairs = uncached * cached + uncached * (uncached + 1) / 2
    times: Array = np.where(uncached > 0, cost.fixed + cost.per_token * uncached + cost.per_pair * pairs, 0.0)
    return times


def kv_sizes(profile: InstanceProfile, tokens: Array) -> Array:
    """Bytes of KV of prompts of `tokens` tokens, elementwise."""
    sizes: Array = np.where(tokens > 0, profile.kv_fixed + profile.kv_per_token * tokens, 0.0)
    return sizes


def _table(table: PrefillTable, uncached: Array) -> Array:
    """Log-log interpolation; the outer slopes go on beyond the ends."""
    x, y = np.log(table.tokens), np.log(table.seconds)
    at = np.log(np.maximum(uncached, 1e-9))
    right = np.clip(np.searchsorted(x, at, side="right"), 1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    times: Array = np.where(uncached > 0, np.exp(y[right - 1] + slope * (at - x[right - 1])), 0.0)
    return times
