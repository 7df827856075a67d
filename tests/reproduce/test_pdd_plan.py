"""PDD's service level and cost tables by the planner's equations."""

from __future__ import annotations

import pytest

from pdrelay.plan.evaluate import Evaluator
from pdrelay.reproduce.pdd_plan import CDC, IDC, PDD, problem
from pdrelay.reproduce.pdd_setup import PRICES


def test_goodput_cost_and_benefit_cost_ratio_are_near_the_published_ones() -> None:
    low, high = ((Evaluator(problem(price)).worth(PDD), Evaluator(problem(price)).worth(IDC)) for price in PRICES)
    assert low[0].goodput == pytest.approx(11.5, rel=0.02)
    assert low[1].goodput == pytest.approx(9.0, rel=0.05)
    assert [pdd.cost / idc.cost for pdd, idc in (low, high)] == pytest.approx([0.929, 0.965], rel=0.001)
    assert [pdd.ratio / idc.ratio for pdd, idc in (low, high)] == pytest.approx([1.375, 1.324], rel=0.05)


def test_the_relay_is_what_keeps_the_service_level() -> None:
    evaluator = Evaluator(problem(PRICES[0]))
    assert evaluator.worth(CDC).goodput == 0
    assert evaluator.times(PDD, 11.5).ttst[1] == pytest.approx(9.8, rel=0.03)
