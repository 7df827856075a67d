"""Linear costs from measured times, by least squares over relative errors; no cost is below 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdrelay.errors import ConfigError
from pdrelay.perf.profile import DecodeCost, ForwardCost


class Sample(NamedTuple):
    """Times of one piece of work, repeated.

    Of a forward: `tokens` computed behind `context`. Of a decode step: `tokens` sequences with `context` tokens in all.
    """

    tokens: int
    context: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Standard deviation by mean."""
        return float(np.std(self.seconds) / np.mean(self.seconds))


def fit_forward(samples: Sequence[Sample]) -> tuple[ForwardCost, float]:
    """The cost, and its largest relative error over `samples`. Raises ConfigError for fewer than 2 different ones."""
    terms = [[1.0, s.tokens, s.tokens * s.context + s.tokens * (s.tokens + 1) / 2] for s in samples]
    (fixed, per_token, per_pair), error = _fit(terms, samples)
    return ForwardCost(fixed=fixed, per_token=per_token, per_pair=per_pair), error


def fit_decode(samples: Sequence[Sample]) -> tuple[DecodeCost, float]:
    """The same of decode steps."""
    (fixed, per_sequence, per_context), error = _fit([[1.0, s.tokens, s.context] for s in samples], samples)
    return DecodeCost(fixed=fixed, per_sequence=per_sequence, per_context_token=per_context), error


def _fit(terms: list[list[float]], samples: Sequence[Sample]) -> tuple[list[float], float]:
    if len({sample[:2] for sample in samples}) < 2:
        raise ConfigError("profile: found fewer than 2 different lengths, expected more to fit a cost to")
    times = np.array([sample.median for sample in samples])
    matrix = np.array(terms)
    scaled = matrix / times[:, None]
    used = list(range(matrix.shape[1]))
    solution: npt.NDArray[np.float64] = np.zeros(matrix.shape[1])
    while used:  # what comes out below 0 is left out, the rest fitted again
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            solution[used] = found
            break
        used = [column for column, value in zip(used, found, strict=True) if value >= 0]
    error = float(np.max(np.abs(matrix @ solution / times - 1)))
    return [float(value) for value in solution], error
