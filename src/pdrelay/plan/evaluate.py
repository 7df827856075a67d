"""What a plan is worth: the rate at which it keeps the promise, what that costs, and how fast it answers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pdrelay.plan.latency import Latency, Times
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan, Problem, price_of, settled
from pdrelay.plan.rates import Rates, egress_price, rates

HOUR = 3600.0
PRECISION = 1e-3
"""Of the goodput, relative."""


class Worth(NamedTuple):
    """A plan with what it does."""

    plan: Plan
    rates: Rates
    goodput: float  # requests/s with the promise kept
    cost: float  # an hour at `serves` requests/s, egress included
    serves: float  # requests/s that it is meant for: the required rate, or its goodput

    @property
    def ratio(self) -> float:
        """Requests for each unit of price: the benefit-cost ratio."""
        return self.serves * HOUR / self.cost if self.cost else math.inf if self.serves else 0.0


class Evaluator:
    """Evaluates plans of one problem; what depends on main cluster and threshold alone is computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._loads: dict[tuple[str, float], Loads] = {}
        self._worth: dict[tuple[object, ...], Worth] = {}

    def loads(self, plan: Plan) -> Loads:
        """The coefficients of a plan."""
        key = (plan.main, plan.threshold)
        if key not in self._loads:
            self._loads[key] = Loads(self.problem, plan.main, np.array([plan.threshold]))
        return self._loads[key]

    def worth(self, plan: Plan) -> Worth:
        """Rates, goodput and cost."""
        plan = settled(self.problem, plan)
        key = (plan.main, plan.threshold, plan.hit_threshold, tuple(sorted((p, r.value, n) for (p, r), n in
                                                                           plan.counts.items() if n)))  # fmt: skip
        if key not in self._worth:
            self._worth[key] = self._evaluate(plan)
        return self._worth[key]

    def seen(self) -> list[Worth]:
        """Everything that was evaluated."""
        return list(self._worth.values())

    def times(self, plan: Plan, rate: float) -> Times:
        """Times at a rate."""
        return Latency(self.loads(plan), plan).times(rate)

    def _evaluate(self, plan: Plan) -> Worth:
        loads = self.loads(plan)
        found = rates(loads, plan)
        good = self._goodput(loads, plan, found.total)
        assert good <= found.total or not good, f"INV-PLAN-2: {good} of {found.total}"
        serves = min(good, self.problem.rate) if self.problem.aim == "cost" else good
        cost = price_of(self.problem, plan.counts) + serves * egress_price(loads, plan) * HOUR
        return Worth(plan, found, good, cost, serves)

    def _goodput(self, loads: Loads, plan: Plan, most: float) -> float:
        promise = self.problem.promise
        if most <= 0 or not math.isfinite(most):
            return 0.0
        if promise.ttft == math.inf and promise.ttst == math.inf:
            return most
        latency = Latency(loads, plan)
        if not latency.keeps(most * 1e-6):
            return 0.0
        least, full = 0.0, most
        while full - least > PRECISION * most:
            middle = (least + full) / 2
            least, full = (middle, full) if latency.keeps(middle) else (least, middle)
        return least


def better(problem: Problem, a: Worth, b: Worth) -> bool:
    """Whether `a` serves the aim better than `b`; what is not feasible is worse, the more it lacks."""
    return value(problem, a) > value(problem, b)


def value(problem: Problem, worth: Worth) -> tuple[float, ...]:
    """Larger is better; compares feasibility first, then the aim, then the cheaper one."""
    if problem.aim == "cost":
        short = min(0.0, worth.goodput / problem.rate - 1)
        return (short if short < -PRECISION else 0.0, -worth.cost, worth.goodput)
    aim = worth.ratio if problem.aim == "ratio" and worth.goodput else worth.goodput
    # Equal rates to a part in a thousand: the cheaper one.
    return (_rounded(aim), -worth.cost, aim)


def feasible(problem: Problem, worth: Worth) -> bool:
    """Whether the plan does what is asked for."""
    return worth.goodput > 0 and (problem.aim != "cost" or worth.goodput >= problem.rate * (1 - PRECISION))


def _rounded(number: float) -> float:
    """To three digits and a half, so that noise does not decide."""
    return round(number, 3 - math.floor(math.log10(number))) if 0 < number < math.inf else number
