"""The results of `pdrelay bench serve` as text and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdrelay.bench.failures import failed
from pdrelay.bench.load_metrics import Timing, values
from pdrelay.bench.serve import Report
from pdrelay.ui import page as pages
from pdrelay.ui.charts import Axis, Point, Series, line_chart

LABELS = {
    "ttft": "time to first token", "ttst": "time to second token", "tpot": "time per output token",
    "itl": "between chunks", "e2el": "end to end", "largest_gap": "largest gap", "lag": "sent late by",
}  # fmt: skip
FIGURES = ("mean", "median", "p90", "p99")
CURVE_POINTS = 200
BINS = 60


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    if report.result:
        table = Table("ms", "mean", "P50", "P90", "P99", box=None, pad_edge=False)
        for name, label in LABELS.items():
            table.add_row(label, *(f"{report.result[f'{figure}_{name}_ms']:,.1f}" for figure in FIGURES))
        console.print(table)
        for sentence in _sentences(report):
            console.print(sentence, highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for line in failed(report.failures):
        console.print(line, highlight=False, markup=False)


def html(report: Report) -> str:
    """A page with the same, and charts."""
    done = [timing for timing in report.timings if not timing.error]
    notes = [*_sentences(report), *report.notes, *failed(report.failures)]
    played = [(key.replace("_", " "), _plain(value)) for key, value in report.workload.items() if value is not None]
    machine = report.machine
    played += [("machine", f"{machine.cores} cores of {machine.processor}"), ("date", machine.date)]
    sections = [
        pages.Section("Requests", [pages.Table(("", ""), [*_requests(report), *played])], notes=notes),
        pages.Section("Latencies, counted from the moment at which a request was due", [_latencies(report)],
                      _distributions(done)),
        pages.Section("Over time", charts=_over_time(report.timings)),
    ]  # fmt: skip
    return pages.page(f"pdrelay bench serve: {report.model} at {report.endpoint}", sections)


def _sentences(report: Report) -> list[str]:
    result, limits = report.result, report.result.get("goodput_limits") or {}
    if not result:
        return []
    good = f", {result['request_goodput']:.3f} good" if limits else ""
    factors = {key: report.workload.get(key, 1.0) for key in ("length_factor", "output_factor", "speed")}
    changed = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in factors.items() if value != 1)
    return [
        f"{result['completed']:,} of {result['completed'] + result['failed']:,} requests in "
        f"{result['duration']:,.1f} s: {result['request_throughput']:.3f} requests/s{good}, "
        f"{result['output_throughput']:,.1f} output tokens/s, at most {result['max_concurrent_requests']:,} at a time",
        *([f"the workload was changed: {changed}"] if changed else []),
    ]


def _requests(report: Report) -> list[tuple[str, str]]:
    result = report.result
    if not result:
        return []
    limits = ", ".join(f"{name} {most:g} ms" for name, most in result["goodput_limits"].items())
    return [
        ("completed", f"{result['completed']:,}"),
        ("failed", f"{result['failed']:,}"),
        ("duration", f"{result['duration']:,.1f} s"),
        ("requests/s", f"{result['request_throughput']:.3f}"),
        *([(f"good requests/s ({limits})", f"{result['request_goodput']:.3f}")] if limits else []),
        ("output tokens/s", f"{result['output_throughput']:,.1f}"),
        ("prompt tokens", f"{result['total_input_tokens']:,}"),
        ("of them cached", f"{result['cached_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
    ]


def _latencies(report: Report) -> pages.Table:
    result = report.result
    shown = (*FIGURES[:3], "p95", "p99")
    rows = [
        (label, *(f"{result[f'{figure}_{name}_ms']:,.1f}" for figure in shown))
        for name, label in (LABELS.items() if result else ())
    ]
    return pages.Table(("ms", "mean", "P50", "P90", "P95", "P99"), rows)


def _plain(value: Any) -> str:
    return f"{value:,.5g}" if isinstance(value, float) else str(value)


# ---- charts ----


def _distributions(done: Sequence[Timing]) -> list[tuple[str, str]]:
    def chart(*names: str) -> str:
        lines = [Series(LABELS[name], distribution(values(done, name))) for name in names]
        return line_chart(lines, Axis("seconds", logarithmic=True), Axis("share of requests", least=0, most=1))

    return [
        ("TTFT and TTST", chart("ttft", "ttst")),
        ("TPOT, gaps between chunks, largest gap", chart("tpot", "itl", "largest_gap")),
        ("End to end", chart("e2el")),
        ("Lateness of the generator", chart("lag")),
    ]


def distribution(found: Sequence[float]) -> list[Point]:
    """The distribution function of some values, in at most CURVE_POINTS points."""
    if not found:
        return []
    shares = (np.arange(min(CURVE_POINTS, len(found))) + 0.5) / min(CURVE_POINTS, len(found))
    return list(zip(np.quantile(found, shares).tolist(), shares.tolist(), strict=True))


def _over_time(timings: Sequence[Timing]) -> list[tuple[str, str]]:
    seconds = Axis("seconds since the start")
    done = [timing for timing in timings if not timing.error]
    first = [
        Series(LABELS[name], [(timing.due, getattr(timing, name)) for timing in done], dots=True)
        for name in ("ttft", "ttst")
    ]
    return [
        (
            "TTFT and TTST by the moment at which requests were due",
            line_chart(first, seconds, Axis("seconds", least=0)),
        ),
        ("Requests under way", line_chart([Series("requests", _running(timings))], seconds, Axis("requests", least=0))),
        ("Output rate", line_chart([Series("tokens", _rate(done))], seconds, Axis("tokens/s", least=0))),
    ]


def _running(timings: Sequence[Timing]) -> list[Point]:
    ended = [timing for timing in timings if timing.sent == timing.sent and timing.e2el == timing.e2el]
    steps = sorted([(t.sent, 1) for t in ended] + [(t.due + t.e2el, -1) for t in ended])
    points: list[Point] = []
    count = 0
    for moment, step in steps:
        points += [(moment, float(count)), (moment, float(count + step))]
        count += step
    return points


def _rate(done: Sequence[Timing]) -> list[Point]:
    """Chunks by time, weighted so that each request has the tokens that it had."""
    moments, weights = [], []
    for timing in done:
        chunks = len(timing.itls) + 1
        moments += list(accumulate(timing.itls, initial=timing.due + timing.ttft))
        weights += [timing.output_tokens / chunks] * chunks
    if not moments:
        return []
    counts, edges = np.histogram(moments, BINS, weights=weights)
    width = max(float(edges[1] - edges[0]), 1e-9)
    return list(zip(((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width).tolist(), strict=True))
