"""Hit rates: a Beta distribution on an interval, from the moments that papers print.

PDD prints neither parameter, only the range (2 to 99 %), the mean (0.90) and how much lies above 0.95 (70 to 80 %).
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p
from typing import NamedTuple

import numpy as np

from pdrelay.errors import ConfigError


class SkewedHits(NamedTuple):
    """Beta(a, b) on [low, high]."""

    a: float
    b: float
    low: float = 0.0
    high: float = 1.0

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray:
        """`count` hit rates."""
        rates: np.ndarray = self.low + (self.high - self.low) * random.beta(self.a, self.b, count)
        return rates

    def share_above(self, rate: float) -> float:
        """P(hit rate > `rate`)."""
        return 1 - incomplete_beta(self.a, self.b, (rate - self.low) / (self.high - self.low))


def skewed_hits(mean: float, share: float, above: float, low: float = 0.0, high: float = 1.0) -> SkewedHits:
    """The Beta on [low, high] with this mean and P(hit > above) = `share`. Raises ConfigError when there is none."""
    centre = (mean - low) / (high - low)
    if not 0 < centre < 1 or not low < above < high:
        raise ConfigError(f"hit rate: found mean {mean} and bound {above}, expected both between {low} and {high}")

    def with_concentration(b: float) -> SkewedHits:
        return SkewedHits(b * centre / (1 - centre), b, low, high)

    least, most = 1e-4, 1e3  # the more concentrated, the more lies above a bound below the mean, the less above it
    falling = with_concentration(least).share_above(above) > with_concentration(most).share_above(above)
    for _ in range(60):
        middle = (least * most) ** 0.5
        too_much = with_concentration(middle).share_above(above) > share
        least, most = (middle, most) if too_much == falling else (least, middle)
    found = with_concentration(middle)
    if abs(found.share_above(above) - share) > 1e-6:
        raise ConfigError(f"hit rate: no Beta on {low} to {high} has mean {mean} and {share} above {above}")
    return found


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete Beta function I_x(a, b), by Lentz's continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return value
