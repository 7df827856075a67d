"""The hit rates have the moments that the report prints."""

from __future__ import annotations

import numpy as np
import pytest

from pdrelay.workload.hit_rates import hit_rates, poisson_arrivals


def test_skewed_rates_have_the_published_mean_range_and_tail() -> None:
    rates = hit_rates("skewed", 4000, np.random.default_rng(1))
    assert rates.mean() == pytest.approx(0.90, abs=0.003)
    assert 0.70 <= (rates > 0.95).mean() <= 0.80
    assert rates.min() >= 0.02
    assert rates.min() < 0.06
    assert 0.985 < rates.max() <= 0.99


def test_narrow_rates_are_uniform() -> None:
    rates = hit_rates("narrow", 4000, np.random.default_rng(1))
    assert rates.mean() == pytest.approx(0.90, abs=0.001)
    assert (rates.min(), rates.max()) == pytest.approx((0.85, 0.95), abs=0.001)
    assert np.quantile(rates, 0.25) == pytest.approx(0.875, abs=0.001)


@pytest.mark.parametrize("name", ["skewed", "narrow"])
def test_even_a_short_draw_has_the_mean_and_its_order_is_random(name: str) -> None:
    means = [hit_rates(name, 200, np.random.default_rng(seed)).mean() for seed in range(20)]  # type: ignore[arg-type]
    assert np.allclose(means, 0.90, atol=0.01)
    rates = hit_rates(name, 2000, np.random.default_rng(3))  # type: ignore[arg-type]
    assert abs(np.corrcoef(rates[:-1], rates[1:])[0, 1]) < 0.1


def test_arrivals_are_poisson_with_a_fixed_count() -> None:
    moments = poisson_arrivals(80, 100, np.random.default_rng(2))
    assert len(moments) == 8000
    assert (np.diff(moments) >= 0).all()
    gaps = np.diff(moments)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert np.histogram(moments, 100)[0].var() == pytest.approx(80, rel=0.4)


def test_the_same_seed_gives_the_same_work() -> None:
    first, second = (hit_rates("skewed", 50, np.random.default_rng(7)) for _ in range(2))
    assert (first == second).all()
