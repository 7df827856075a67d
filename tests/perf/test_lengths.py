"""Length distributions and the vectorised times agree with sampling and with the scalar forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.perf.arrays import kv_sizes, prefill_times
from pdrelay.perf.catalog import find_instance
from pdrelay.perf.lengths import Lengths, Parted, lognormal

LENGTHS = st.lists(st.floats(1, 2e5), min_size=1, max_size=40)


def test_a_lognormal_distribution_has_the_moments_of_its_samples() -> None:
    lengths = lognormal(9.9, 1.0, 128, 131_072, 100)
    raw = np.random.default_rng(1).lognormal(9.9, 1.0, 400_000)
    drawn = raw[(raw >= 128) & (raw <= 131_072)]
    assert lengths.mean(lengths.prompt) == pytest.approx(drawn.mean(), rel=0.005)
    assert lengths.mean(lengths.prompt**2) == pytest.approx((drawn**2).mean(), rel=0.01)
    parted = Parted(lengths.prompt, lengths.weight, np.array([19_400.0]))
    assert parted.goes[0] == pytest.approx((drawn > 19_400).mean(), abs=0.003)
    assert parted.mean_of_go(lengths.prompt)[0] == pytest.approx(drawn[drawn > 19_400].mean(), rel=0.005)


@given(LENGTHS, st.floats(0, 3e5))
def test_both_sides_of_a_threshold_make_up_the_whole(sizes: list[float], threshold: float) -> None:
    lengths = Lengths.of(sizes, [0.0] * len(sizes), [1.0] * len(sizes))
    parted = Parted(lengths.prompt, lengths.weight, np.array([threshold]))
    whole = parted.stays * parted.mean_of_stay(lengths.prompt) + parted.goes * parted.mean_of_go(lengths.prompt)
    assert parted.stays[0] + parted.goes[0] == pytest.approx(1)
    assert parted.stays[0] == pytest.approx(np.mean(np.array(sizes) <= threshold))
    assert whole[0] == pytest.approx(np.mean(sizes))


@pytest.mark.parametrize("name", ["prfaas-1t-h200", "prfaas-1t-h20"])
def test_times_of_many_are_those_of_each(name: str) -> None:
    profile = find_instance(name).profile()
    uncached = np.array([0.0, 1.0, 100.0, 1024.0, 5000.0, 32_768.0, 2e5])
    for cached in (0.0, 7000.0):
        expected = [profile.prefill_seconds(tokens, cached) for tokens in uncached]
        assert prefill_times(profile, uncached, cached) == pytest.approx(expected)
    assert kv_sizes(profile, uncached) == pytest.approx([profile.kv_bytes(tokens) for tokens in uncached])


def test_drawn_requests_follow_the_points_exactly() -> None:
    lengths = lognormal(9.0, 0.8, 128, 65_536, 50)
    drawn = np.array(list(itertools.islice(lengths.draws(seed=3), 640)))[:, 0]
    assert drawn.mean() == pytest.approx(lengths.mean(lengths.prompt), rel=0.01)
    blocks = drawn.reshape(10, 64)
    plain = np.random.default_rng(1).choice(lengths.prompt, (10, 64), p=lengths.weight)
    assert blocks.mean(axis=1).std() < plain.mean(axis=1).std() / 2


def test_no_request_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        Lengths.of([], [], [])
