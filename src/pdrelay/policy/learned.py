"""Costs that are learned from what was observed, as pure state."""

from __future__ import annotations

from typing import NamedTuple

FORGETTING = 0.98
"""Weight of the past at each observation: about the last fifty count."""


class LinearCost(NamedTuple):
    """`fixed + per_unit * units`, fitted by least squares that forget. Units and costs are what the user takes."""

    weight: float = 0.0
    x: float = 0.0  # weighted sums of units, costs and their products
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, units: float, cost: float) -> LinearCost:
        """With one more observation."""
        kept = (FORGETTING * value for value in self)
        return LinearCost(*map(sum, zip(kept, (1.0, units, cost, units * units, units * cost), strict=True)))

    def predict(self, units: float) -> float | None:
        """The cost of `units`, None when nothing was observed."""
        if not self.weight:
            return None
        spread = self.weight * self.xx - self.x * self.x
        # Observations of one size say nothing of the slope.
        slope = (self.weight * self.xy - self.x * self.y) / spread if spread > 1e-9 * self.weight * self.xx else 0.0
        slope = max(slope, 0.0)
        return max((self.y - slope * self.x) / self.weight + slope * units, 0.0)
