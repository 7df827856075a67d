import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.policy.learned import LinearCost


def test_nothing_is_known_before_the_first_observation():
    assert LinearCost().predict(5) is None


@given(st.floats(0, 10), st.floats(0, 1), st.lists(st.integers(1, 100), min_size=2, max_size=40))
def test_a_linear_cost_is_found_once_two_sizes_were_seen(fixed, per_unit, sizes):
    cost = LinearCost()
    for size in sizes:
        cost = cost.observe(size, fixed + per_unit * size)
    at = sizes[-1] if len(set(sizes)) == 1 else 50
    assert cost.predict(at) == pytest.approx(fixed + per_unit * at, abs=1e-3)


def test_what_changed_is_learned_again():
    cost = LinearCost()
    for _ in range(100):
        cost = cost.observe(4, 1.0)
    for _ in range(200):
        cost = cost.observe(4, 2.0)
    assert cost.predict(4) == pytest.approx(2.0, abs=0.05)


def test_a_cost_never_falls_with_size():
    cost = LinearCost().observe(1, 5.0).observe(10, 1.0)
    assert cost.predict(100) >= 0
    assert cost.predict(100) == cost.predict(1)
