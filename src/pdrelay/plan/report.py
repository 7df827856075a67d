"""The HTML report of a plan: the optimum, its Pareto front, the paper's two curves for this case, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.stages import of_share
from pdrelay.plan.evaluate import HOUR, Worth
from pdrelay.plan.exhaustive import thresholds_of
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import LOCAL_ONLY, Plan, Problem, settled
from pdrelay.plan.rates import counts_of, decode_capacity, local_capacity, offload_capacity
from pdrelay.plan.study import Study, text_of
from pdrelay.plan.verify import Verified
from pdrelay.ui.bars import bar_chart
from pdrelay.ui.charts import Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page

RATE = Axis("requests/s", least=0)
PERCENT = "{:+.1%}".format
POINTS = 200


def html(title: str, found: Study) -> str:
    """A page in one file."""
    if found.reasons:
        notes = [reason.sentence for reason in found.reasons]
        near = [text_of(reason.worth.plan) for reason in found.reasons if reason.worth is not None]
        return page(title, [Section("Not feasible", notes=[*notes, *(f"nearest: {text}" for text in near)])])
    front = found.optimum.front
    sections = [
        Section("Optimum", [_optimum(found)], notes=[text_of(found.best.plan), f"Full first: {found.binding}."]),
        Section("Goodput and cost", [front_table(front)], [("Pareto front", pareto(front))]),
        Section("The two conditions of the optimum", charts=curves(found.problem, found.best.plan)),
        Section("Neighbours", [neighbour_table(found)]),
        Section("When conditions change", [sensitivity_table(found)], [("Goodput", tornado(found))]),
    ]
    if found.verified:
        sections.insert(1, Section("Beside the simulator", [verified_table(each) for _, each in found.verified],
                                   notes=[note for worth, each in found.verified
                                          for note in (text_of(worth.plan), *each.reasons)]))  # fmt: skip
    return page(title, sections)


def _optimum(found: Study) -> Table:
    best, times = found.best, found.times
    rows: list[tuple[str, str]] = [
        ("goodput", f"{best.goodput:.3f} requests/s"),
        ("highest rate of the stages", f"{best.rates.total:.3f} requests/s"),
        ("remote prefill, local prefill, decode",
         f"{best.rates.offload:.3f}, {best.rates.local:.3f}, {best.rates.decode:.3f} requests/s"),
        ("offloaded", f"{best.rates.offloaded:.1%}"),
        ("egress at the highest rate", f"{best.rates.egress * 8e-9:.2f} Gbit/s"),
        ("cost of an hour", f"{best.cost:,.2f}"),
        ("requests for each unit of price", f"{best.ratio:,.1f}"),
    ]  # fmt: skip
    if times is not None:
        rows += [
            ("TTFT: mean, P50, P90, P99", ", ".join(f"{v:.2f}" for v in (times.ttft_mean, *times.ttft)) + " s"),
            ("TTST: mean, P50, P90, P99", ", ".join(f"{v:.2f}" for v in (times.ttst_mean, *times.ttst)) + " s"),
            ("time per token", f"{times.tpot * 1e3:.1f} ms"),
        ]
    return Table(("", ""), rows)


def front_table(front: Sequence[Worth]) -> Table:
    """Plans that no other beats, by cost."""
    rows = [
        (text_of(w.plan), f"{w.cost:,.2f}", f"{w.goodput:.3f}", f"{w.goodput * HOUR / w.cost:,.1f}", w.rates.binding)
        for w in front
    ]
    return Table(("plan", "cost", "goodput", "requests/price", "full first"), rows)


def pareto(front: Sequence[Worth]) -> str:
    """Goodput by cost."""
    points = [(w.cost, w.goodput) for w in front]
    return line_chart([Series("plans", points, marks=True)], Axis("cost of an hour", least=0), RATE)


def curves(problem: Problem, plan: Plan) -> list[tuple[str, str]]:
    """Figures 5a and 5b of PrfaaS for this case."""
    plan = settled(problem, plan)
    charts = [("Rate by split of local instances", text) for text in [split_curve(problem, plan)] if text]
    if 0 < plan.threshold < LOCAL_ONLY:
        charts.append(("Rate by threshold", threshold_curve(problem, plan)))
    return charts


def split_curve(problem: Problem, plan: Plan) -> str:
    """Prefill and decode bound by how many of a pool's instances prefill; empty where no pool does both."""
    both = [p for p in problem.pools if plan.of(p.name, Role.PREFILL) and plan.of(p.name, Role.DECODE)]
    if not both:
        return ""
    pool = max(both, key=lambda p: plan.of(p.name, Role.PREFILL) + plan.of(p.name, Role.DECODE))
    together = plan.of(pool.name, Role.PREFILL) + plan.of(pool.name, Role.DECODE)
    loads = Loads(problem, plan.main, np.array([plan.threshold]))
    share = float(loads.offloaded[0])
    upstream, decode = [], []
    for prefills in range(together + 1):
        counts = {**plan.counts, (pool.name, Role.PREFILL): prefills, (pool.name, Role.DECODE): together - prefills}
        changed = plan._replace(counts=counts)
        offload = of_share(offload_capacity(loads, counts_of(changed, Role.PREFILL)), share)
        local = of_share(local_capacity(loads, counts_of(changed, Role.PREFILL)), 1 - share)
        upstream.append((float(prefills), float(min(offload[0], local[0]))))
        decode.append((float(prefills), float(decode_capacity(loads, counts_of(changed, Role.DECODE))[0])))
    rate = [(x, min(a, b)) for (x, a), (_, b) in zip(upstream, decode, strict=True)]
    series = [Series("prefill bound", upstream, dashed=True), Series("decode bound", decode, dashed=True),
              Series("rate", rate, marks=True)]  # fmt: skip
    most = 1.6 * max(y for _, y in rate)
    return line_chart(series, Axis(f"{pool.name} instances that prefill, of {together}"), RATE._replace(most=most))


def threshold_curve(problem: Problem, plan: Plan) -> str:
    """What remote and local prefill bound the rate to, by threshold."""
    loads = Loads(problem, plan.main, thresholds_of(problem, plan.main, POINTS)[1:-1])
    prefills = counts_of(plan, Role.PREFILL)
    offload = of_share(offload_capacity(loads, prefills), loads.offloaded)
    local = of_share(local_capacity(loads, prefills), loads.local)
    decode = float(decode_capacity(loads, counts_of(plan, Role.DECODE))[0])
    rate = np.minimum(np.minimum(offload, local), decode)
    across = loads.thresholds / 1e3

    def line(name: str, values: np.ndarray, *, dashed: bool = True) -> Series:
        return Series(name, list(zip(across.tolist(), values.tolist(), strict=True)), dashed)

    series = [line("remote prefill", offload), line("local prefill", local),
              line("decode", np.full_like(across, decode)), line("rate", rate, dashed=False)]  # fmt: skip
    shown = Axis("threshold t, thousand tokens", least=0, most=min(float(across.max()), 4 * plan.threshold / 1e3))
    return line_chart(series, shown, RATE._replace(most=1.6 * float(rate.max())))


def neighbour_table(found: Study) -> Table:
    """The best moves away from the optimum."""
    best = found.best
    rows = [
        (each.move, f"{each.worth.goodput:.3f}", _change(each.worth.goodput, best.goodput), f"{each.worth.cost:,.2f}",
         _change(each.worth.cost, best.cost), f"{each.worth.ratio:,.1f}", each.worth.rates.binding)
        for each in found.neighbours
    ]  # fmt: skip
    return Table(("move", "goodput", "", "cost", "", "requests/price", "full first"), rows)


def sensitivity_table(found: Study) -> Table:
    """The plan kept, and adapted, under each changed condition."""
    rows = [
        (each.condition, _change(each.kept.goodput, found.best.goodput), _change(each.kept.cost, found.best.cost),
         _change(each.adapted.goodput, found.best.goodput), _change(each.adapted.cost, found.best.cost),
         _difference(found.best.plan, each.adapted.plan))
        for each in found.changed
    ]  # fmt: skip
    head = ("condition", "goodput", "cost", "adapted: goodput", "cost", "what changes")
    return Table(head, rows)


def tornado(found: Study) -> str:
    """Change of goodput by condition, the plan kept and adapted."""
    before = found.best.goodput
    groups = [(each.condition, ((each.kept.goodput / before - 1) * 100, (each.adapted.goodput / before - 1) * 100))
              for each in found.changed]  # fmt: skip
    return bar_chart(groups, ("kept", "adapted"), "change of goodput, %")


def verified_table(verified: Verified) -> Table:
    """Equations beside simulator."""
    rows = [(f.figure, f"{f.planned:.4g}", f"{f.simulated:.4g}", PERCENT(f.difference)) for f in verified.figures]
    return Table(("figure", "planned", "simulated", "difference"), rows)


def _difference(before: Plan, after: Plan) -> str:
    """Which counts and thresholds differ."""
    keys = sorted({*before.counts, *after.counts}, key=lambda key: (key[0], key[1].value))
    parts = [f"{after.of(*key) - before.of(*key):+d} {key[0]} {key[1].value}" for key in keys
             if after.of(*key) != before.of(*key)]  # fmt: skip
    if after.threshold != before.threshold and math.isfinite(after.threshold):
        parts.append(f"t {after.threshold:,.0f}")
    return ", ".join(parts) or "nothing"


def _change(after: float, before: float) -> str:
    return PERCENT(after / before - 1) if before else "-"
