"""The lengths of a workload's requests as weighted points, so that every mean over them is one vector product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import erf, exp, log, sqrt
from typing import Self

import numpy as np
import numpy.typing as npt

from pdrelay.errors import ConfigError

Array = npt.NDArray[np.float64]

CELLS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Requests: `weight` (adds up to 1), `prompt`, `cached` and `output` tokens of each point.

    `cached` is what a cache that has seen every request before holds of the prompt; a cluster's own cache holds a share
    of it.
    """

    weight: Array
    prompt: Array
    cached: Array
    output: Array

    @classmethod
    def of(cls, prompt: npt.ArrayLike, cached: npt.ArrayLike, output: npt.ArrayLike) -> Self:
        """Equally likely requests. Raises ConfigError when there is none."""
        arrays = [np.asarray(values, dtype=np.float64) for values in (prompt, cached, output)]
        count = len(arrays[0])
        if not count:
            raise ConfigError("workload: found no request, expected at least 1")
        return cls(np.full(count, 1 / count), *arrays)

    @property
    def count(self) -> int:
        """Number of points."""
        return len(self.weight)

    def mean(self, values: Array) -> float:
        """Mean of one value a point over the requests."""
        return float(self.weight @ values)

    def uncached(self, share: float = 1.0) -> Array:
        """Tokens to prefill where the cache holds `share` of what could be held; one at least."""
        return np.maximum(self.prompt - share * self.cached, 1.0)

    def scaled(self, prompt: float = 1.0, output: float = 1.0) -> Self:
        """All prompts and what is cached of them `prompt` times as long, all outputs `output` times."""
        return replace(self, prompt=self.prompt * prompt, cached=self.cached * prompt, output=self.output * output)

    def with_hits(self, factor: float) -> Self:
        """All hit rates `factor` times as high, but below the whole prompt."""
        return replace(self, cached=np.minimum(self.cached * factor, np.maximum(self.prompt - 1, 0.0)))

    def coarse(self, count: int) -> Self:
        """At most `count` points: neighbours by uncached length are taken together."""
        if self.count <= count:
            return self
        order = np.argsort(self.uncached(), kind="stable")
        weight = self.weight[order]
        cell = np.minimum((np.cumsum(weight) - weight / 2) * count, count - 1).astype(int)
        total: Array = np.bincount(cell, weight, count).astype(np.float64)
        kept = total > 0
        means = [np.bincount(cell, weight * values[order], count)[kept] / total[kept]
                 for values in (self.prompt, self.cached, self.output)]  # fmt: skip
        return replace(self, weight=total[kept], prompt=means[0], cached=means[1], output=means[2])

    def random_draws(self, seed: int) -> Iterator[tuple[int, int, int]]:
        """Independent requests (prompt, cached, output) without end."""
        return self.draws(seed, 1)

    def draws(self, seed: int, block: int = 64) -> Iterator[tuple[int, int, int]]:
        """Requests (prompt, cached, output) without end and almost without luck: each `block` of them has one of each
        stratum of the uncached lengths, in random order."""
        random = np.random.default_rng(seed)
        order = np.argsort(self.uncached(), kind="stable")
        edges = np.cumsum(self.weight[order])
        while True:
            place = (random.permutation(block) + random.random(block)) / block
            chosen = order[np.searchsorted(edges, place).clip(max=self.count - 1)]
            prompt = np.maximum(np.rint(self.prompt[chosen]), 1)
            cached = np.clip(np.rint(self.cached[chosen]), 0, prompt - 1)
            output = np.maximum(np.rint(self.output[chosen]), 1)
            yield from ((int(p), int(c), int(o)) for p, c, o in zip(prompt, cached, output, strict=True))


def lognormal(mu: float, sigma: float, shortest: float, longest: float, output: float) -> Lengths:
    """Uncached prompts of a lognormal distribution cut off at both ends; outputs of one length (PrfaaS, section 4.1).

    Each point stands for a cell of equal width in the logarithm, with the cell's exact weight and mean.
    """
    edges = np.linspace(log(shortest), log(longest), CELLS + 1)
    below = np.array([_normal((edge - mu) / sigma) for edge in edges])
    below_of_length = np.array([_normal((edge - mu - sigma**2) / sigma) for edge in edges])
    weight = np.diff(below)
    mean = exp(mu + sigma**2 / 2) * np.diff(below_of_length) / np.maximum(weight, 1e-300)
    kept = weight > 0
    weight, mean = weight[kept] / weight.sum(), mean[kept]
    return Lengths(weight, mean, np.zeros_like(mean), np.full_like(mean, output))


def _normal(x: float) -> float:
    return 0.5 * (1 + erf(x / sqrt(2)))


class Parted:
    """Means on both sides of every threshold: requests of at most `t` tokens stay, longer ones go."""

    def __init__(self, size: Array, weight: Array, thresholds: Array) -> None:
        """`size` decides; one value a point."""
        self._order = np.argsort(size, kind="stable")
        self._weight = weight[self._order]
        self._index = np.searchsorted(size[self._order], thresholds, side="right")
        self._stay = self._sums(np.ones_like(size))
        self.stays = self._stay[self._index]
        """Share of requests at or below each threshold."""
        self.goes = np.maximum(self._stay[-1] - self.stays, 0.0)
        """Share above: p of the paper."""

    def _sums(self, values: Array) -> Array:
        return np.concatenate(([0.0], np.cumsum(self._weight * values[self._order])))

    def mean_of_stay(self, values: Array) -> Array:
        """E[value | stays] by threshold; 0 where nothing stays."""
        sums = self._sums(values)
        return _ratio(sums[self._index], self.stays)

    def mean_of_go(self, values: Array) -> Array:
        """E[value | goes] by threshold; 0 where nothing goes."""
        sums = self._sums(values)
        return _ratio(sums[-1] - sums[self._index], self.goes)


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 1e-12)
