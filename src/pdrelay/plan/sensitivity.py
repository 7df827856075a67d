"""What an optimum depends on: its neighbours, and the same plan under other prices, lines, hit rates and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pdrelay.perf.queueing import share_within
from pdrelay.plan.evaluate import Evaluator, Worth, value
from pdrelay.plan.latency import Latency
from pdrelay.plan.moves import all_moves, climb, until
from pdrelay.plan.optimise import POINTS
from pdrelay.plan.problem import Plan, Pool, Problem

SHOWN = 14
ADAPT_SECONDS = 1.0


class Neighbour(NamedTuple):
    """A plan one move away."""

    move: str
    worth: Worth


class Changed(NamedTuple):
    """The optimum after one condition has changed: kept as it is, and adapted to it."""

    condition: str
    kept: Worth
    adapted: Worth


def neighbours(problem: Problem, best: Worth, shown: int = SHOWN) -> list[Neighbour]:
    """The best moves away from the optimum, best first."""
    evaluator = Evaluator(problem)
    found = [Neighbour(move.name, evaluator.worth(move.plan)) for move in all_moves(problem, best.plan)]
    found.sort(key=lambda each: value(problem, each.worth), reverse=True)
    return found[:shown]


def binding(problem: Problem, best: Worth) -> str:
    """What keeps the optimum from more: a stage, a line, or a promise."""
    if best.goodput >= best.rates.total * (1 - 2e-3) or not best.goodput:
        return best.rates.binding
    promise = problem.promise
    latency = Latency(Evaluator(problem).loads(best.plan), best.plan)
    late = share_within(latency.first(min(best.goodput * 1.02, best.rates.total * 0.9999)), promise.ttft)
    name, limit = ("TTFT", promise.ttft) if late < promise.share else ("TTST", promise.ttst)
    return f"promised {name} (P{promise.share * 100:g} {limit:g} s), then {best.rates.binding}"


def sensitivity(problem: Problem, best: Worth) -> list[Changed]:
    """Every condition changed alone."""
    found = []
    for name, changed in conditions(problem, best.plan):
        kept = Evaluator(changed).worth(best.plan)
        search = Evaluator(changed._replace(lengths=changed.lengths.coarse(POINTS)))
        adapted = climb(search, search.worth(best.plan), until(ADAPT_SECONDS))
        found.append(Changed(name, kept, Evaluator(changed).worth(adapted.plan)))
    return found


def conditions(problem: Problem, plan: Plan) -> Iterator[tuple[str, Problem]]:
    """Price of each pool in use, rate of each line in use, hit rates, lengths, outputs."""
    used = [pool for pool in problem.pools if any(name == pool.name and n for (name, _), n in plan.counts.items())]
    for pool in used:
        for factor in (0.8, 1.25):
            if pool.price:
                yield f"price of {pool.name} x {factor:g}", problem._replace(pools=_priced(problem, pool, factor))
    for ends, wire in problem.wires.items():
        if ends[1] == plan.main and any(pool.cluster == ends[0] for pool in used):
            for factor in (0.5, 2.0):
                wires = {**problem.wires, ends: wire._replace(rate=wire.rate * factor)}
                yield f"line from {ends[0]} x {factor:g}", problem._replace(wires=wires)
    if problem.lengths.cached.any():
        for factor in (0.9, 1.05):
            yield f"hit rates x {factor:g}", problem._replace(lengths=problem.lengths.with_hits(factor))
    for factor in (0.8, 1.25):
        yield f"prompts x {factor:g}", problem._replace(lengths=problem.lengths.scaled(prompt=factor))
        yield f"outputs x {factor:g}", problem._replace(lengths=problem.lengths.scaled(output=factor))


def _priced(problem: Problem, changed: Pool, factor: float) -> tuple[Pool, ...]:
    return tuple(
        pool._replace(profile=replace(pool.profile, price=pool.price * factor)) if pool.name == changed.name else pool
        for pool in problem.pools
    )
