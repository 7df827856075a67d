"""PrfaaS's equations, and queueing against cases with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.perf import queueing
from pdrelay.perf.stages import (
    compute_rate,
    decode_rate,
    egress_demand,
    kv_throughput,
    offload_rate,
    role_imbalance,
    routing_imbalance,
    system_rate,
)

POSITIVE = st.floats(0.01, 100)


def test_each_equation_on_numbers_worked_out_by_hand() -> None:
    assert kv_throughput(100.0, 2.0) == 50.0
    assert egress_demand(4, 100.0, 2.0) == 200.0
    assert compute_rate(4.0, 2.0) == 2.0
    assert offload_rate(4.0, 2.0, 300.0, 100.0) == 2.0
    assert offload_rate(4.0, 2.0, 100.0, 100.0) == 1.0
    assert decode_rate(5.0, 20.0, 0.025, 1024.0) == pytest.approx(3.90625)
    assert system_rate(np.array([1.0]), 0.5, np.array([2.0]), 3.0) == 2.0


@given(POSITIVE, POSITIVE, POSITIVE, st.floats(0.01, 0.99))
def test_no_stage_is_asked_for_more_than_it_has(offload: float, local: float, decode: float, share: float) -> None:
    total = float(system_rate(np.array([offload]), share, np.array([local]), decode)[0])
    assert total * share <= offload * (1 + 1e-9)
    assert total * (1 - share) <= local * (1 + 1e-9)
    assert total <= decode
    assert any(total == pytest.approx(bound) for bound in (offload / share, local / (1 - share), decode))


def test_where_both_conditions_hold_no_stage_is_idle() -> None:
    offload, local, share, decode = np.array([2.0]), np.array([3.0]), 0.4, 5.0
    assert routing_imbalance(offload, share, local) == pytest.approx(0)
    assert role_imbalance(offload, local, decode) == pytest.approx(0)
    assert system_rate(offload, share, local, decode) == pytest.approx(5.0)


def test_one_exponential_server_waits_as_the_textbook_says() -> None:
    rate, seconds = 0.8, 1.0
    found = queueing.wait(rate, 1, seconds, 2 * seconds**2)
    assert found.busy == pytest.approx(0.8)
    assert found.average == pytest.approx(rate / (1 - rate))
    weight = np.array([1.0])
    stream = queueing.Stream(weight, np.array([0.0]), found)
    assert queueing.percentile([stream], 0.9) == pytest.approx(math.log(8) / 0.2, rel=1e-6)


def test_erlang_c_of_several_servers() -> None:
    assert queueing.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert queueing.erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-3)


def test_a_full_queue_has_no_percentile() -> None:
    found = queueing.wait(2.0, 1, 1.0, 1.0)
    assert found.mean == math.inf
    assert queueing.percentile([queueing.Stream(np.array([1.0]), np.array([1.0]), found)], 0.5) == math.inf


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=8), st.floats(0.05, 0.95), st.floats(0, 20))
def test_percentiles_invert_shares(points: list[tuple[float, float]], share: float, mean: float) -> None:
    weight = np.array([w for w, _ in points])
    stream = queueing.Stream(weight / weight.sum(), np.array([s for _, s in points]), queueing.Wait(0.5, mean))
    found = queueing.percentile([stream], share)
    assert queueing.share_within([stream], found) >= share - 1e-9
    assert queueing.share_within([stream], found * (1 - 1e-6) - 1e-9) <= share + 1e-3 or found < 1e-6
