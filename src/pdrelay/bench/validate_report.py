"""The results of `pdrelay bench validate` as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table

from pdrelay.bench.failures import failed
from pdrelay.bench.load_metrics import Timing
from pdrelay.bench.validate import Report
from pdrelay.bench.validation import METRICS, ROOM, Metric
from pdrelay.ui import page as pages
from pdrelay.ui.charts import Axis, Series, line_chart

HEAD = ("", "real P50", "simulated P50", "error", "two real runs", "limit", "")
LABELS = {"ttft": "TTFT", "ttst": "TTST", "tpot": "TPOT", "e2el": "E2EL"}


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    for title, metrics in (("calibration", report.calibration), ("validation", report.metrics)):
        if metrics:
            table = Table(title, *HEAD[1:], box=None, pad_edge=False)
            for row in _rows(metrics):
                table.add_row(*row)
            console.print(table)
    for sentence in _sentences(report):
        console.print(sentence, highlight=False, markup=False)
    for line in failed(report.failures):
        console.print(line, highlight=False, markup=False)


def html(report: Report) -> str:
    """A page with the same, and each request real beside simulated."""
    failures = failed(report.failures)
    tables = [pages.Table(HEAD, list(_rows(report.metrics)))] if report.metrics else []
    sections = [
        pages.Section("Validation", tables, _charts(report), [*_sentences(report), *failures]),
        pages.Section("Calibration", [pages.Table(HEAD, list(_rows(report.calibration)))]),
        pages.Section("Measured costs", [_costs(report)]),
    ]
    return pages.page(f"pdrelay bench validate: {report.engine}", sections)


def _rows(metrics: Sequence[Metric]) -> Iterator[tuple[str, ...]]:
    for each in metrics:
        shares = f"{each.error:.1%}", f"{each.difference:.1%}", f"{each.limit:.1%}"
        times = f"{each.real * 1e3:,.1f} ms", f"{each.simulated * 1e3:,.1f} ms"
        yield LABELS[each.name], *times, *shares, "holds" if each.holds else "does not hold"


def _sentences(report: Report) -> Iterator[str]:
    machine = report.machine
    yield f"{report.engine}; {machine.cores} cores of {machine.processor}, load before {machine.load_before}"
    if report.terms:
        cores, front = report.terms["cores"], report.terms["front"]
        shared = f"engines share {cores:g} cores" if cores else "each engine has cores of its own"
        late = f", prefill has a request {front * 1e3:.1f} ms after it was due" if front else ""
        yield f"calibrated: {shared}{late}"
    if report.metrics:
        yield (
            f"{report.requests} requests, not those of the calibration; errors and differences are medians over them; "
            f"the limit is 10 %, or {ROOM:g} times the difference of two real runs"
        )


def _costs(report: Report) -> pages.Table:
    rows = [
        (each.instance, kind, " ".join(f"{key} {value:.3g}" for key, value in cost.items()), f"{each.errors[kind]:.1%}")
        for each in report.costs
        for kind, cost in each.costs.items()
    ]
    return pages.Table(("instance", "work", "seconds", "fit off by"), rows)


def _charts(report: Report) -> list[tuple[str, str]]:
    """Each request a dot; on the line the simulation is right."""
    runs = {name: found for name, found in report.runs.items() if name != "calibration"}
    found = []
    for metric in METRICS if report.simulated and runs else ():
        dots = [Series(name, _points(report, timings, metric), dots=True) for name, timings in runs.items()]
        values = [value for series in dots for point in series.points for value in point]
        known = [value for value in values if isfinite(value)]
        if not known:
            continue
        least, most = min(known), max(known)
        line = Series("equal", [(least, least), (most, most)], dashed=True)
        axes = [Axis(f"{run}, seconds", least=least, most=most) for run in ("real", "simulated")]
        found.append((LABELS[metric], line_chart([*dots, line], *axes)))
    return found


def _points(report: Report, timings: Sequence[Timing], metric: str) -> list[tuple[float, float]]:
    keys = [(timing, f"{timing.session}/{timing.turn}") for timing in timings if not timing.error]
    return [(getattr(t, metric), report.simulated[key][metric]) for t, key in keys if key in report.simulated]
