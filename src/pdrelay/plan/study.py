"""Everything about one problem that `pdrelay plan` shows."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.plan.evaluate import Evaluator, Worth, feasible
from pdrelay.plan.infeasible import Infeasible, explain
from pdrelay.plan.latency import Times
from pdrelay.plan.optimise import Optimum, optimise
from pdrelay.plan.problem import Plan, Problem
from pdrelay.plan.sensitivity import Changed, Neighbour, binding, neighbours, sensitivity
from pdrelay.plan.verify import Verified, verify

VERIFIED = 3
"""Plans of the front that are run in the simulator with the best one."""


class Study(NamedTuple):
    """A problem, its optimum or why there is none, and what the optimum depends on."""

    problem: Problem
    optimum: Optimum
    reasons: list[Infeasible]  # empty when the optimum is feasible
    binding: str
    times: Times | None
    neighbours: list[Neighbour]
    changed: list[Changed]
    verified: list[tuple[Worth, Verified]]

    @property
    def best(self) -> Worth:
        """The optimum."""
        return self.optimum.best


def study(problem: Problem, *, check: bool = False, seconds: float = 4.0) -> Study:
    """Plans `problem`; `check` runs the best few in the simulator. Raises ConfigError."""
    optimum = optimise(problem, seconds)
    best = optimum.best
    if not feasible(problem, best):
        return Study(problem, optimum, explain(problem), "", None, [], [], [])
    times = Evaluator(problem).times(best.plan, min(best.serves, 0.95 * best.rates.total))
    others = [worth for worth in reversed(optimum.front) if worth.plan != best.plan][: VERIFIED - 1]
    verified = [(worth, verify(problem, worth)) for worth in (best, *others)] if check else []
    return Study(
        problem, optimum, [], binding(problem, best), times, neighbours(problem, best), sensitivity(problem, best),
        verified,
    )  # fmt: skip


def as_dict(found: Study) -> dict[str, Any]:
    """For JSON."""
    return {
        "feasible": not found.reasons,
        "aim": found.problem.aim,
        "method": found.optimum.method,
        "seconds": found.optimum.seconds,
        "examined": found.optimum.examined,
        "infeasible": [_reason(each) for each in found.reasons],
        "best": None if found.reasons else worth_dict(found.best),
        "binding": found.binding,
        "times": found.times._asdict() if found.times else None,
        "front": [worth_dict(worth) for worth in found.optimum.front],
        "neighbours": [{"move": each.move, **worth_dict(each.worth)} for each in found.neighbours],
        "sensitivity": [
            {"condition": each.condition, "kept": worth_dict(each.kept), "adapted": worth_dict(each.adapted)}
            for each in found.changed
        ],
        "verified": [
            {
                **worth_dict(worth),
                "figures": [{**each._asdict(), "difference": each.difference} for each in verified.figures],
                "reasons": verified.reasons,
            }
            for worth, verified in found.verified
        ],
    }


def worth_dict(worth: Worth) -> dict[str, Any]:
    """A plan and its figures; the threshold is None when nothing is offloaded."""
    plan = worth.plan
    return {
        "main": plan.main,
        "threshold": plan.threshold if plan.threshold < float("inf") else None,
        "hit_threshold": plan.hit_threshold,
        "instances": [{"pool": pool, "role": role.value, "count": n} for (pool, role), n in sorted(
            plan.counts.items(), key=lambda item: (item[0][0], item[0][1].value)) if n],
        "rates": worth.rates._asdict(),
        "goodput": worth.goodput,
        "serves": worth.serves,
        "cost": worth.cost,
        "requests_per_price": worth.ratio,
    }  # fmt: skip


def _reason(reason: Infeasible) -> dict[str, Any]:
    near = worth_dict(reason.worth) if reason.worth is not None else None
    return {"promise": reason.promise, "asked": reason.asked, "nearest": reason.nearest, "reason": reason.sentence,
            "plan": near}  # fmt: skip


def text_of(plan: Plan) -> str:
    """A plan in a line."""
    parts = [f"{n} {pool} {role.value}" for (pool, role), n in sorted(
        plan.counts.items(), key=lambda item: (list(Role).index(item[0][1]), item[0][0])) if n]  # fmt: skip
    t = "nothing offloaded" if plan.threshold == float("inf") else (
        f"t {plan.threshold:,.0f}" if plan.threshold else "everything offloaded"
    )  # fmt: skip
    hits = f", H {plan.hit_threshold:g}" if plan.hit_threshold else ""
    return f"{', '.join(parts)}; {t}{hits}; decode in {plan.main}"
