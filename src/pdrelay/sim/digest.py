"""Distributions of any number of values in bounded memory: logarithmic buckets of 0.1 % width."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isnan, log, sqrt

WIDTH = 1e-3
LEAST = 1e-6
"""Values below are counted as this."""


class Digest:
    """Counts, exact mean and deviation, percentiles within 0.1 %."""

    __slots__ = ("_buckets", "_squares", "_total", "count", "largest", "least")

    def __init__(self) -> None:
        self.count = 0
        self._total = self._squares = 0.0
        self.least, self.largest = float("inf"), float("-inf")
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Counts `value`; nan is no value."""
        if isnan(value):
            return
        self.count += 1
        self._total += value
        self._squares += value * value
        self.least, self.largest = min(self.least, value), max(self.largest, value)
        bucket = int(log(max(value, LEAST) / LEAST) / WIDTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """Exact mean; 0 of nothing."""
        return self._total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Exact standard deviation."""
        return sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value below which `percent` of all lie; 0 of nothing."""
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Several of them; `percents` rising."""
        found: list[float] = []
        wanted = [percent / 100 * self.count for percent in percents]
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            while len(found) < len(wanted) and seen >= wanted[len(found)]:
                value = LEAST * exp((bucket + 0.5) * WIDTH)
                found.append(min(max(value, self.least), self.largest))
        return found + [0.0] * (len(wanted) - len(found))

    def curve(self, points: int = 100) -> list[tuple[float, float]]:
        """The distribution function as (value, share) points."""
        percents = [100 * (i + 0.5) / points for i in range(points)]
        return [(value, percent / 100) for value, percent in zip(self.percentiles(percents), percents, strict=True)]
