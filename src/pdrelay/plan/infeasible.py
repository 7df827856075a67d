"""Why nothing does what is asked for: the promise that cannot be kept, and the nearest one that can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pdrelay.plan.evaluate import Worth, feasible
from pdrelay.plan.optimise import optimise
from pdrelay.plan.problem import Problem, holding

STEPS = 12
"""Halvings of the distance to the nearest promise."""

SEARCH_SECONDS = 0.7
WORDS = {"rate": "rate", "ttft": "TTFT", "ttst": "TTST", "tpot": "time per token"}


class Infeasible(NamedTuple):
    """The promise that cannot be kept, what was asked and the nearest that is possible, and a plan for that."""

    promise: str
    asked: float
    nearest: float
    worth: Worth | None
    sentence: str


class _Term(NamedTuple):
    name: str
    unit: str
    asked: float
    without: Problem
    at: Callable[[float], Problem]
    found: Callable[[Worth], float] | None = None  # where the plan without it tells the nearest at once


def explain(problem: Problem) -> list[Infeasible]:
    """Each promise that alone stands in the way, the others kept; what none alone explains, all together."""
    if not holding(problem):
        return [_memory(problem)]
    terms = _terms(problem)
    reasons = [reason for term in terms if (reason := _alone(term)) is not None]
    return reasons or [_together(problem, terms)]


def _terms(problem: Problem) -> list[_Term]:
    promise = problem.promise
    terms = []
    if problem.aim == "cost":
        free = problem._replace(aim="rate")
        terms.append(_Term("rate", "requests/s", problem.rate, free, lambda rate: problem._replace(rate=rate),
                           lambda worth: worth.goodput))  # fmt: skip
    for name in ("ttft", "ttst", "tpot"):
        asked = getattr(promise, name)
        if asked < math.inf:
            terms.append(_Term(name, "s", asked, _with(problem, name, math.inf), _setter(problem, name)))
    return terms


def _with(problem: Problem, name: str, limit: float) -> Problem:
    return problem._replace(promise=problem.promise._replace(**{name: limit}))


def _setter(problem: Problem, name: str) -> Callable[[float], Problem]:
    return lambda limit: _with(problem, name, limit)


def _alone(term: _Term) -> Infeasible | None:
    """The reason, if dropping this promise is enough."""
    free = optimise(term.without, SEARCH_SECONDS).best
    if not feasible(term.without, free):
        return None
    if term.found is not None:
        nearest, worth = term.found(free), free
    else:
        nearest, worth = _nearest(term)
    return Infeasible(term.name, term.asked, nearest, worth, _sentence(term, nearest, worth))


def _nearest(term: _Term) -> tuple[float, Worth]:
    """The smallest limit with a plan."""
    least, most = term.asked, term.asked * 2
    best = _at(term, most)
    while best is None and most < 1e6 * term.asked:
        least, most = most, most * 2
        best = _at(term, most)
    if best is None:
        return math.inf, optimise(term.without, SEARCH_SECONDS).best
    for _ in range(STEPS):
        middle = math.sqrt(least * most)
        found = _at(term, middle)
        if found is None:
            least = middle
        else:
            most, best = middle, found
    return most, best


def _at(term: _Term, limit: float) -> Worth | None:
    problem = term.at(limit)
    found = optimise(problem, SEARCH_SECONDS).best
    return found if feasible(problem, found) else None


def _sentence(term: _Term, nearest: float, worth: Worth) -> str:
    return (
        f"the {WORDS[term.name]} of {term.asked:.4g} {term.unit} cannot be kept with the rest of the request; the "
        f"nearest feasible one is {nearest:.4g} {term.unit}, where {worth.rates.binding} is full first"
    )


def _together(problem: Problem, terms: list[_Term]) -> Infeasible:
    """No single promise is at fault: all times are stretched alike."""
    times = [term for term in terms if term.name != "rate"]
    if not times:
        return Infeasible("deployment", problem.rate, 0.0, None, "no plan serves any request at all")
    together = _Term("stretch", "", 1.0, problem, lambda factor: _stretched(problem, factor))
    factor, worth = _nearest(together)
    names = " and ".join(WORDS[term.name] for term in times)
    if math.isinf(factor):
        sentence = f"{names} cannot be kept, however long they may be: no plan serves what is asked for"
        return Infeasible(names, 1.0, factor, None, sentence)
    nearest = ", ".join(f"{WORDS[term.name]} {term.asked * factor:.4g} s" for term in times)
    sentence = (
        f"{names} cannot be kept together, and no single one of them is at fault; the nearest feasible, all stretched "
        f"alike, are {nearest}, where {worth.rates.binding} is full first"
    )
    return Infeasible(names, 1.0, factor, worth, sentence)


def _stretched(problem: Problem, factor: float) -> Problem:
    promise = problem.promise
    longer = {name: getattr(promise, name) * factor for name in ("ttft", "ttst", "tpot")}
    return problem._replace(promise=promise._replace(**longer))


def _memory(problem: Problem) -> Infeasible:
    lengths = problem.lengths
    longest = float((lengths.prompt + lengths.output).max())
    most = max(pool.profile.capacity_tokens for pool in problem.pools)
    sentence = (
        f"a request of {longest:,.0f} tokens fits into no instance's KV memory; the longest that fits has {most:,} "
        "tokens"
    )
    return Infeasible("memory", longest, float(most), None, sentence)
