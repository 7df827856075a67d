"""A comparison as text and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdrelay.bench.compare.experiment import BASELINE, BEST, OURS, STOCK
from pdrelay.bench.compare.rows import TIERS, Row
from pdrelay.bench.compare.run import Report
from pdrelay.bench.failures import failed
from pdrelay.ui import page as pages
from pdrelay.ui.charts import Axis, Point, Series, line_chart

HEAD = ("", "completed", "failed", "TTFT P50", "P90", "P99", "TTST P50", "P90", "P99", "TPOT P90", "largest gap",
        "relay share", "on the line", "line use")  # fmt: skip
AROUND = 4.0
BIN = 0.25
"""Seconds around a seam, and of one bin of an output rate there."""
BINS = 80


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    for sentence in sentences(report):
        console.print(sentence, highlight=False, markup=False)
    table = Table(*HEAD, box=None, pad_edge=False)
    for row in _table(report):
        table.add_row(*row)
    console.print(table)
    for text in findings(report):
        console.print(text, highlight=False, markup=False)
    for line in failed(report.failures):
        console.print(line, highlight=False, markup=False)


def sentences(report: Report) -> list[str]:
    """What was done, where and when."""
    machine, setup = report.machine, report.setup
    first = (
        f"{report.command}: {machine.date}, {machine.cores} cores of {machine.processor}, "
        f"load before {machine.load_before}, {report.engines} engines"
    )
    if not setup:
        return [first]
    rate = f"{setup['line_rate_here_mbit']:.1f} Mbit/s"
    if "line_rate_modelled_mbit" in setup:
        rate += f" here, as {setup['line_rate_modelled_mbit']:.0f} Mbit/s for the evaluation's KV"
    return [
        first,
        f"{setup['requests']} requests a policy, {setup['requests_per_s']:.3f}/s, on {setup['instances']}; line "
        f"{rate}, load {setup['line_load']:g}, round trip {setup['rtt_s'] * 1e3:g} ms, {setup['line']}"
        f"{' (' + setup['line_note'] + ')' if setup['line_note'] else ''}; speed {setup['speed']:g}, prompts of "
        f"{setup['prompt_tokens']} tokens (factor {setup['length_factor']:g}), outputs of {setup['output_mean']:g} on "
        "average. Times are at the evaluation's scale: what passed here, times the speed.",
    ]


def _side(ratio: float) -> str:
    return f"{abs(1 - ratio):.0%} {'below' if ratio <= 1 else 'above'}"


def findings(report: Report) -> list[str]:
    """What follows from the table."""
    found = []
    for q in (50, 90, 99):
        found += [
            f"P{q} TTST of {OURS} is {_side(less.value)} {slower} "
            f"(paired, 95 %: {_side(less.high)} to {_side(less.low)})"
            for slower in (BASELINE, STOCK)
            if (less := report.comparisons.get(f"p{q}_ttst_{OURS}_over_{slower}")) is not None
        ]
        if (more := report.comparisons.get(f"p{q}_ttst_{OURS}_over_{BEST}")) is not None:
            found.append(
                f"P{q} TTST of {OURS} is {more.value:.2f} times that of {BEST} ({more.low:.2f} to {more.high:.2f})"
            )
    for policy, real in report.policies.items():
        simulated = report.simulated.get(policy)
        if simulated is not None:
            found.append(_beside_simulated(policy, real, simulated))
    return found


def _beside_simulated(policy: str, real: dict[str, Any], simulated: dict[str, Any]) -> str:
    def ratio(key: str) -> str:
        a, b = real.get(key), simulated.get(key)
        return f"{a / b:.2f}" if a and b else "none"

    return (
        f"{policy}, played over simulated: P50 TTFT {ratio('p50_ttft_ms')}, P90 TTFT {ratio('p90_ttft_ms')}, P50 TTST "
        f"{ratio('p50_ttst_ms')}, P90 TTST {ratio('p90_ttst_ms')}, P90 TPOT {ratio('p90_tpot_ms')}, relay share "
        f"{ratio('relay_share')}, bytes {ratio('wan_bytes')}"
    )


def _table(report: Report) -> list[list[str]]:
    rows = [_cells(name, figures) for name, figures in report.policies.items()]
    return rows + [_cells(f"{name}, simulated", figures) for name, figures in report.simulated.items()]


def _cells(name: str, found: dict[str, Any]) -> list[str]:
    times = [found[f"p{q}_{of}_ms"] for of in ("ttft", "ttst") for q in (50, 90, 99)]
    return [
        name, str(found["completed"]), str(found["failed"]), *(_seconds(value) for value in times),
        "" if found["p90_tpot_ms"] is None else f"{found['p90_tpot_ms']:.1f} ms", _seconds(found["max_gap_ms"]),
        f"{found['relay_share']:.1%}", f"{found['wan_bytes'] / 1e6:.0f} MB", f"{found['line_use']:.0%}",
    ]  # fmt: skip


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1e3:.2f} s"


# ---- the page ----


def html(report: Report) -> str:
    """A page with the table, and the figures of the evaluation."""
    title = f"pdrelay bench compare: policies on {report.engines} engines"
    return pages.page(title, sections(report))


def sections(report: Report) -> list[pages.Section]:
    """Of the page; also of a page that shows more."""
    failures = failed(report.failures)
    return [
        pages.Section("Table 4: times to the first tokens", [pages.Table(HEAD, _table(report))],
                      notes=[*sentences(report), *findings(report), *failures]),
        pages.Section("Figure 7: transfer latency and time to the first tokens, by request", charts=_figure_7(report)),
        pages.Section("Figure 8: who made the output", [_figure_8(report)]),
        pages.Section("Output rates", charts=_rates(report)),
        pages.Section("Distributions, played and simulated", charts=_distributions(report)),
    ]  # fmt: skip


def _figure_7(report: Report) -> list[tuple[str, str]]:
    def chart(name: str, label: str) -> str:
        series = [
            Series(policy, [(row.due, getattr(row, name)) for row in rows], dots=True)
            for policy, rows in report.rows.items()
        ]
        return line_chart(series, Axis("seconds since the start"), Axis(label, logarithmic=True))

    return [
        ("KV transfer, from prefill's end until main decode has it", chart("transfer", "seconds")),
        ("TTST (the paper's TTFT, whose first token is the first decode step's)", chart("ttst", "seconds")),
        ("TTFT (prefill's own token)", chart("ttft", "seconds")),
    ]


def _figure_8(report: Report) -> pages.Table:
    def share(found: dict[str, Any]) -> list[str]:
        made, total = found["tokens_by_tier"], max(found["output_tokens"], 1)
        return [f"{made[tier]:,} ({made[tier] / total:.1%})" for tier in TIERS]

    rows = [(name, *share(found)) for name, found in report.policies.items()]
    rows += [(f"{name}, simulated", *share(found)) for name, found in report.simulated.items()]
    return pages.Table(("output tokens", *TIERS), rows)


def _rates(report: Report) -> list[tuple[str, str]]:
    whole = [Series(policy, _rate(rows)) for policy, rows in report.rows.items()]
    seams = [
        Series(policy, curve)
        for policy, rows in report.rows.items()
        if (curve := seam_curve(rows))
    ]  # fmt: skip
    charts = [("All streams together", line_chart(whole, Axis("seconds since the start"), Axis("tokens/s", least=0)))]
    if seams:
        across = Axis("seconds since main decode's first token")
        charts.append(("One stream across the seam, mean", line_chart(seams, across, Axis("tokens/s", least=0))))
    return charts


def _rate(rows: Sequence[Row]) -> list[Point]:
    moments = [row.due + moment for row in rows for moment in row.moments]
    if not moments:
        return []
    counts, edges = np.histogram(moments, BINS)
    width = max(float(edges[1] - edges[0]), 1e-9)
    return list(zip(((edges[:-1] + edges[1:]) / 2).tolist(), (counts / width).tolist(), strict=True))


def seam_curve(rows: Sequence[Row]) -> list[Point]:
    """Mean tokens a second of one stream around its handoff, over the streams that run there."""
    edges = np.linspace(-AROUND, AROUND, round(2 * AROUND / BIN) + 1)
    counts, seen = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for row in rows:
        if math.isfinite(row.handoff) and len(row.moments) > 2:
            shifted = np.array(row.moments[1:]) - row.handoff
            counts += np.histogram(shifted, edges)[0]
            seen += (shifted[0] <= edges[:-1]) & (edges[1:] <= shifted[-1])
    middles = (edges[:-1] + edges[1:]) / 2
    return [(float(m), float(c / n / BIN)) for m, c, n in zip(middles, counts, seen, strict=True) if n]


def _distributions(report: Report) -> list[tuple[str, str]]:
    return [(f"TTST of {policy}", _pair(report, policy, "ttst")) for policy in report.rows]


def _pair(report: Report, policy: str, name: str) -> str:
    sides = (("played", report.rows, False), ("simulated", report.simulated_rows, True))
    series = [Series(label, _distribution(rows.get(policy, []), name), dashed) for label, rows, dashed in sides]
    return line_chart(series, Axis("seconds", logarithmic=True), Axis("share of requests", least=0, most=1))


def _distribution(rows: Sequence[Row], name: str) -> list[Point]:
    found = sorted(value for row in rows if math.isfinite(value := getattr(row, name)))
    return [(value, (place + 0.5) / len(found)) for place, value in enumerate(found)]
