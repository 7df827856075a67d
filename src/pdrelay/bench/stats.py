"""Medians, percentiles and how far to trust them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A value and its bootstrap interval at 95 %."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """As people read it."""
        return f"{self.value:.{digits}g} ({self.low:.{digits}g} to {self.high:.{digits}g})"


def median(values: Sequence[float]) -> float:
    """The median."""
    return float(np.median(values))


def estimate(
    statistic: Callable[..., Any], *samples: Sequence[float], block: int = 1, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """`statistic` of the samples, which are paired row by row, with a percentile bootstrap interval.

    The statistic takes arrays whose last axis is the sample and keeps the others. `block` resamples runs of so many
    neighbours together, for rows that are not independent of those beside them.
    """
    rows = np.asarray(samples, dtype=np.float64)
    size = rows.shape[1]
    rng = np.random.default_rng(seed)
    blocks = -(-size // block)
    starts = rng.integers(0, size, (resamples, blocks))
    picks = ((starts[:, :, None] + np.arange(block)) % size).reshape(resamples, -1)[:, :size]
    spread = statistic(*(row[picks] for row in rows))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(spread, [tail, 1 - tail])
    return Estimate(float(statistic(*rows)), float(low), float(high))


def median_of(values: Floats) -> Any:
    """Median over the last axis."""
    return np.median(values, axis=-1)


def median_ratio(numerators: Floats, denominators: Floats) -> Any:
    """Median of row-wise ratios over the last axis."""
    return np.median(numerators / denominators, axis=-1)


def percentile(q: float) -> Callable[[Floats], Any]:
    """The statistic `q`-th percentile over the last axis."""
    return lambda values: np.percentile(values, q, axis=-1)


def percentile_ratio(q: float) -> Callable[[Floats, Floats], Any]:
    """The statistic: ratio of two samples' `q`-th percentiles."""
    return lambda left, right: np.percentile(left, q, axis=-1) / np.percentile(right, q, axis=-1)
