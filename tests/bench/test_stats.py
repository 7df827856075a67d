"""Estimates: the value, and an interval that means something."""

from __future__ import annotations

import numpy as np
import pytest

from pdrelay.bench.stats import estimate, median_of, median_ratio, percentile, percentile_ratio


def test_the_interval_of_a_median_covers_the_true_one_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        found = estimate(median_of, random.exponential(1, 60).tolist(), seed=seed, resamples=300)
        covered += found.low <= np.log(2) <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_ratios_are_of_pairs() -> None:
    found = estimate(median_ratio, [2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    paired = estimate(percentile_ratio(99), [3.0 * x for x in range(1, 50)], [float(x) for x in range(1, 50)])
    assert (paired.low, paired.high) == pytest.approx((3.0, 3.0))


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    values = np.repeat(np.random.default_rng(1).exponential(1, 30), 20).tolist()
    alone, together = (estimate(percentile(50), values, block=block) for block in (1, 20))
    assert together.high - together.low > 2 * (alone.high - alone.low)
