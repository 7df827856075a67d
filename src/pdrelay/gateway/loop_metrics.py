"""Metrics of one event loop: what prometheus_client's do, without a lock and a search for each observation.

They are written in the loop's thread alone, thousands of times a second, and read for an exposition now and then.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """A histogram without labels."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        """`buckets` are rising upper bounds, without the infinite one."""
        self._name, self._text, self._bounds = name, text, list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Takes one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """For the registry."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        rows = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=rows, sum_value=self._sum)


class LoopCounter(Collector):
    """A counter with one label, all of whose values are known."""

    def __init__(
        self, name: str, text: str, label: str, values: Iterable[enum.Enum], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self.counts = dict.fromkeys(values, 0)
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """For the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self.counts.items():
            family.add_metric([value.value], count)
        yield family
