"""Arrival processes: moments in seconds, rising, without end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

CHUNK = 4096

Process = Literal["poisson", "constant", "bursty", "diurnal"]


class Arrivals(NamedTuple):
    """How requests arrive.

    bursty: gamma distributed gaps whose coefficient of variation is `cv` (Poisson has 1). diurnal: a Poisson process
    whose rate swings by `swing` (0 to 1) around the mean with `period` seconds.
    """

    rate: float  # mean, per second
    process: Process = "poisson"
    cv: float = 3.0
    swing: float = 0.5
    period: float = 86_400.0

    def times(self, random: np.random.Generator) -> Iterator[float]:
        """All moments."""
        now = 0.0
        while True:
            moments = now + np.cumsum(self._gaps(random))
            now = float(moments[-1])
            if self.process == "diurnal":
                moments = moments[random.random(CHUNK) * (1 + self.swing) < self._relative(moments)]
            yield from moments.tolist()

    def _gaps(self, random: np.random.Generator) -> np.ndarray:
        if self.process == "constant":
            return np.full(CHUNK, 1 / self.rate)
        if self.process == "bursty":
            shape = 1 / self.cv**2
            return random.gamma(shape, 1 / (shape * self.rate), CHUNK)
        # A diurnal process is thinned from the highest rate.
        return random.exponential(1 / (self.rate * (1 + self.swing * (self.process == "diurnal"))), CHUNK)

    def _relative(self, moments: np.ndarray) -> np.ndarray:
        swings: np.ndarray = 1 + self.swing * np.sin(2 * math.pi * moments / self.period)
        return swings
