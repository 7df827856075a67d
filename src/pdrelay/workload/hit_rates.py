"""Prefix hit rates of PDD's transfer experiment (technical report, section 2.2 and Table 2), both with mean 0.90.

Skewed: "2 % to 99 % following a highly skewed Beta distribution", 70 to 80 % of requests above 95 %. The report prints
no parameters; `SKEWED` has the mean and 75 %. Narrow: uniform from 85 % to 95 %.

Draws are stratified: each of `count` equal shares of the distribution gives one rate, in random order. A short run has
the distribution's mean and tail then, and does not overload a line by the luck of a few large requests.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from pdrelay.workload.hits import skewed_hits

Name = Literal["skewed", "narrow"]

SKEWED = skewed_hits(mean=0.90, share=0.75, above=0.95, low=0.02, high=0.99)
NARROW_RANGE = (0.85, 0.95)

_OVERSAMPLING = 64


def hit_rates(name: Name, count: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """`count` hit rates, stratified, in random order."""
    many = count * _OVERSAMPLING
    raw = SKEWED.sample(random, many) if name == "skewed" else random.uniform(*NARROW_RANGE, many)
    shares = np.sort(raw).reshape(count, _OVERSAMPLING)
    picked = shares[np.arange(count), random.integers(0, _OVERSAMPLING, count)]
    rates: npt.NDArray[np.float64] = random.permutation(picked)
    return rates


def poisson_arrivals(rate: float, duration: float, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Moments of a Poisson process in `duration` seconds, given that as many come as `rate` lets expect; rising."""
    moments: npt.NDArray[np.float64] = np.sort(random.random(max(1, round(rate * duration))) * duration)
    return moments
