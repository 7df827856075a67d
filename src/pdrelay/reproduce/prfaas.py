"""PrfaaS's tables and figures: published beside obtained."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.lengths import Array
from pdrelay.plan.grid import Grid, best_plan, search
from pdrelay.plan.latency import Latency, Times
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Mode, Plan, Problem, price_of
from pdrelay.plan.rates import Rates, rates
from pdrelay.reproduce.prfaas_models import model_rows
from pdrelay.reproduce.prfaas_setup import (
    BASELINE_INSTANCES,
    H20,
    H200,
    LINE,
    LOCAL,
    LOCAL_INSTANCES,
    REMOTE_INSTANCES,
    USED,
    naive,
    problem,
)
from pdrelay.reproduce.rows import Row, RowKind
from pdrelay.ui.charts import Axis, Series, line_chart

PRINTED_THRESHOLD = 19_400.0


class Deployed(NamedTuple):
    """One column of Table 6."""

    plan: Plan
    rates: Rates
    idle: Times  # the paper's definition: prefill alone
    used: Times  # with waiting, at `USED` of the rate


class Report(NamedTuple):
    """All rows, and what the figures are drawn from."""

    rows: list[Row]
    grid: Grid


def reproduce() -> Report:
    """Computes everything; nothing is simulated."""
    case = problem()
    columns, grid = table6(case)
    return Report(
        [*model_rows(), *_table6(columns), *_section4(case, columns), *_distribution(case), *_at_printed(case)], grid
    )


def table6(case: Problem, mode: Mode = "representative") -> tuple[dict[str, Deployed], Grid]:
    """The three deployments at their optimum, and the grid that the first comes from."""
    ours, _, grid = best_plan(case, LOCAL, H20, LOCAL_INSTANCES, {H200: REMOTE_INSTANCES}, mode)
    alone, _, _ = best_plan(case, LOCAL, H20, BASELINE_INSTANCES, {}, mode)
    plans = {"PrfaaS-PD": ours, "homogeneous": alone, "naive": naive()}
    return {name: _deployed(case, plan, mode) for name, plan in plans.items()}, grid


def _deployed(case: Problem, plan: Plan, mode: Mode) -> Deployed:
    thresholds = np.array([plan.threshold])
    found = rates(Loads(case, plan.main, thresholds, mode), plan)
    # Times are means over the lengths in either mode: the paper's TTFTs are those of a distribution.
    latency = Latency(Loads(case, plan.main, thresholds), plan)
    real = rates(latency.loads, plan)
    return Deployed(plan, found, latency.times(0.0), latency.times(USED * real.total))


def _table6(columns: dict[str, Deployed]) -> list[Row]:
    ours, alone, naive_one = columns["PrfaaS-PD"], columns["homogeneous"], columns["naive"]
    return [
        _row6("PrfaaS-PD: t", "tokens", PRINTED_THRESHOLD, ours.plan.threshold),
        _row6("PrfaaS-PD: prefill instances", "", 3, ours.plan.of(H20, Role.PREFILL)),
        _row6("PrfaaS-PD: decode instances", "", 5, ours.plan.of(H20, Role.DECODE)),
        _row6("homogeneous: prefill instances", "", 9, alone.plan.of(H20, Role.PREFILL)),
        _row6("homogeneous: decode instances", "", 3, alone.plan.of(H20, Role.DECODE)),
        *_times6("PrfaaS-PD", ours, (2.22, 3.51), "predicted"),
        *_times6("homogeneous", alone, (4.44, 9.73), "calibrated"),
        *_times6("naive", naive_one, (1.74, 3.51), "predicted"),
        _row6("PrfaaS-PD: Theta_prfaas", "requests/s", 1.61, ours.rates.offload),
        _row6("PrfaaS-PD: Theta_pd-p", "requests/s", 1.64, ours.rates.local, "calibrated"),
        _row6("PrfaaS-PD: Theta_pd-d", "requests/s", 3.91, ours.rates.decode, "calibrated"),
        _row6("homogeneous: Theta_pd-p", "requests/s", 2.11, alone.rates.local, "calibrated"),
        _row6("homogeneous: Theta_pd-d", "requests/s", 2.35, alone.rates.decode),
        _row6("naive: Theta_prfaas", "requests/s", 2.45, naive_one.rates.offload),
        _row6("naive: Theta_pd-d", "requests/s", 6.25, naive_one.rates.decode),
        _row6("PrfaaS-PD: Lambda_max", "requests/s", 3.24, ours.rates.total),
        _row6("homogeneous: Lambda_max", "requests/s", 2.11, alone.rates.total, "calibrated"),
        _row6("naive: Lambda_max", "requests/s", 2.45, naive_one.rates.total),
        _row6("PrfaaS-PD by homogeneous", "times", 1.54, ours.rates.total / alone.rates.total),
        _row6("naive by homogeneous", "times", 1.16, naive_one.rates.total / alone.rates.total),
    ]


def _row6(quantity: str, unit: str, published: float | None, obtained: float, kind: RowKind = "predicted") -> Row:
    return Row("Table 6", quantity, unit, published, float(obtained), kind)


def _times6(name: str, column: Deployed, published: tuple[float, float], kind: RowKind) -> list[Row]:
    used = f"with waiting, at {USED:.0%} of its rate"
    return [
        _row6(f"{name}: mean TTFT", "s", published[0], column.idle.ttft_mean, kind),
        _row6(f"{name}: P90 TTFT", "s", published[1], column.idle.ttft[1], kind),
        _row6(f"{name}: mean TTFT {used}", "s", None, column.used.ttft_mean),
        _row6(f"{name}: P90 TTFT {used}", "s", None, column.used.ttft[1]),
    ]


def _section4(case: Problem, columns: dict[str, Deployed]) -> list[Row]:
    ours, alone = columns["PrfaaS-PD"], columns["homogeneous"]
    loads = Loads(case, LOCAL, np.array([ours.plan.threshold]), "representative")
    cost = price_of(case, ours.plan.counts) / price_of(case, alone.plan.counts)
    gain = ours.rates.total / alone.rates.total / cost
    most = int(price_of(case, ours.plan.counts) / case.pools[1].price)
    _, equal, _ = best_plan(case, LOCAL, H20, most, {}, "representative")
    reduction = 1 - ours.idle.ttft[1] / alone.idle.ttft[1]
    where = "Section 4.3"
    return [
        Row("Section 4.1", "mean length", "tokens", 27_000, case.lengths.mean(case.lengths.prompt), "predicted"),
        Row(where, "offloaded share", "share", 0.496, ours.rates.offloaded, "predicted"),
        Row(where, "mean offloaded length", "tokens", 44 * 1024, float(loads.offloaded_length[0]), "predicted"),
        Row(where, "egress", "Gbit/s", 13, ours.rates.egress * 8e-9, "predicted",
            "Throughput x p x E[S given L > t] of the paper's own numbers is 3.24 x 0.496 x 932 MB x 8 = 12.0 Gbit/s; "
            "about 13 is the four instances' KV throughput at 32K, 4 x 3.19, in place of their share of the rate"),
        Row(where, "share of the line", "share", 0.13, ours.rates.egress / LINE, "predicted",
            "It is the egress above by 100 Gbit/s"),
        Row(where, "gain at equal cost", "times", 1.15, gain, "calibrated"),
        Row(where, f"gain over {most} homogeneous instances, which cost as much", "times", 1.15,
            ours.rates.total / equal.total, "predicted"),
        Row(where, "P90 TTFT by homogeneous: reduction", "share", 0.64, reduction, "calibrated"),
    ]  # fmt: skip


def _distribution(case: Problem) -> list[Row]:
    """What the means hide: the same optimum over the whole distribution of lengths."""
    columns, _ = table6(case, "distribution")
    where = "Beyond the paper: over all lengths"
    rows = [Row(where, f"{name}: Lambda_max", "requests/s", None, each.rates.total, "predicted")
            for name, each in columns.items()]  # fmt: skip
    ours = columns["PrfaaS-PD"]
    rows.append(Row(where, "PrfaaS-PD: t", "tokens", None, ours.plan.threshold, "predicted"))
    ratio = ours.rates.total / columns["homogeneous"].rates.total
    rows.append(Row(where, "PrfaaS-PD by homogeneous", "times", None, ratio, "predicted"))
    return rows


def _at_printed(case: Problem) -> list[Row]:
    """The printed optimum put in: how far it is from ours."""
    counts = {(H20, Role.PREFILL): 3, (H20, Role.DECODE): 5, (H200, Role.PREFILL): REMOTE_INSTANCES}
    plan = Plan(LOCAL, PRINTED_THRESHOLD, counts)
    found = rates(Loads(case, LOCAL, np.array([PRINTED_THRESHOLD]), "representative"), plan)
    where = "Table 6 at t = 19,400"
    return [
        Row(where, "Theta_prfaas", "requests/s", 1.61, found.offload, "predicted"),
        Row(where, "Theta_pd-p", "requests/s", 1.64, found.local, "calibrated"),
        Row(where, "Lambda_max", "requests/s", 3.24, found.total, "predicted"),
        Row(where, "offloaded share", "share", 0.496, found.offloaded, "predicted"),
    ]


# ---- Figure 5 ----


def figures(grid: Grid) -> list[tuple[str, str]]:
    """Figures 5a and 5b: caption and SVG."""
    row, column = grid.best
    return [
        (f"Figure 5a: rate by split of local instances, at t = {grid.thresholds[column]:,.0f} tokens",
         split_chart(grid, column)),
        (f"Figure 5b: rate by threshold, with {grid.prefills[row]:.0f} prefill and {grid.decodes[row]:.0f} decode "
         "instances", threshold_chart(grid, row)),
    ]  # fmt: skip


def split_chart(grid: Grid, column: int) -> str:
    """Prefill bound, decode bound and rate by local prefill instances."""
    upstream, decode, total = grid.by_split(column)
    across = grid.prefills
    series = [_series("prefill bound", across, upstream, dashed=True),
              _series("decode bound", across, decode, dashed=True), _series("rate", across, total)]  # fmt: skip
    return line_chart(series, Axis("local prefill instances"), Axis("requests/s", least=0))


def threshold_chart(grid: Grid, row: int) -> str:
    """Both upstream bounds and the rate by threshold."""
    offload, local, total = grid.by_threshold(row)
    most = 2.0 * float(total.max())
    shown = grid.thresholds <= 3 * grid.thresholds[int(total.argmax())]
    across = grid.thresholds[shown] / 1e3
    series = [
        _series("offload: Theta_prfaas / p", across, offload[shown], dashed=True),
        _series("local: Theta_pd-p / (1 - p)", across, local[shown], dashed=True),
        _series("rate", across, total[shown]),
    ]
    return line_chart(series, Axis("threshold t, thousand tokens", least=0), Axis("requests/s", least=0, most=most))


def _series(name: str, x: Array, y: Array, *, dashed: bool = False) -> Series:
    return Series(name, list(zip(x.tolist(), y.tolist(), strict=True)), dashed)


def whole_grid() -> Grid:
    """The grid of Table 6, for the benchmark of its time."""
    return search(problem(), LOCAL, H20, LOCAL_INSTANCES, {H200: REMOTE_INSTANCES}, "representative")
