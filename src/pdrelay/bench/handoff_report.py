"""A handoff report as text and as a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdrelay.bench import plots
from pdrelay.bench.failures import failed
from pdrelay.bench.handoff import Report
from pdrelay.bench.incremental import Cost
from pdrelay.bench.seam import AROUND, BIN_SECONDS, CURVE_SECONDS, Seams


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    machine = report.machine
    console.print(
        f"{report.command}: {machine.date}, {machine.cores} cores of {machine.processor}, Python {machine.python}, "
        f"load before {machine.load_before}\n{report.engine}; line of {report.line}"
    )
    if report.costs:
        _costs(report.costs, console)
        console.print(report.published)
    if report.seams:
        _seams(report.seams, console)
    for line in failed(report.failures):
        console.print(line, markup=False)


def _costs(costs: Sequence[Cost], console: Console) -> None:
    console.print("\nKV of the relay's tokens at main decode: computed from their ids, or sent (PDD, Table 5)")
    table = Table("tokens", "way", "line", "mean ms", "max ms", "deviation ms", "bytes", box=None, pad_edge=False)
    for cost in sorted(costs, key=lambda cost: (cost.tokens, cost.way, cost.line)):
        times = (f"{1000 * value:.1f}" for value in (cost.mean, cost.max, cost.deviation))
        table.add_row(str(cost.tokens), cost.way, cost.line, *times, f"{cost.bytes:,}")
    console.print(table)


def _seams(found: Sequence[Seams], console: Console) -> None:
    console.print(f"\nPauses between tokens, the largest of {2 * AROUND} neighbours, around the seam and elsewhere")
    table = Table("", *(seam.mode for seam in found), box=None, pad_edge=False)
    rows: dict[str, Callable[[Seams], str]] = {
        "handoffs": lambda s: str(s.handoffs),
        "median gap, ms": lambda s: f"{1000 * s.median_gap:.1f}",
        "pause at the seam P50 / P95 / max, ms": lambda s: _ms(s.pause_p50, s.pause_p95, s.pause_max),
        "pause elsewhere P50 / P95, ms": lambda s: _ms(s.elsewhere_p50, s.elsewhere_p95),
        "seams within a round trip and 2 median gaps": lambda s: f"{s.within_round_trip:.1%}",
        "windows elsewhere within the same": lambda s: f"{s.elsewhere_within_round_trip:.1%}",
        "seams within 1.2 x P95 elsewhere": lambda s: f"{s.within_elsewhere:.1%}",
        "seams within both": lambda s: f"{s.within_both:.1%}",
        "rounds, mean": lambda s: f"{s.rounds_mean:.1f}",
        "extra tokens of the relay, mean": lambda s: f"{s.relay_extra_tokens_mean:.1f}",
        "tokens held back at the switch, mean": lambda s: f"{s.held_back_mean:.1f}",
    }
    for label, text in rows.items():
        table.add_row(label, *(text(seam) for seam in found))
    console.print(table)


def _ms(*seconds: float) -> str:
    return " / ".join(f"{1000 * value:.0f}" for value in seconds)


def plot(report: Report, path: Path) -> None:
    """The output rate across the seam. Raises BenchError when the file cannot be written."""
    figure = plots.figure(8, 4)
    axes = figure.subplots()
    for seam in report.seams:
        times = [-CURVE_SECONDS + BIN_SECONDS * (at + 0.5) for at in range(len(seam.curve))]
        rates = [rate or math.nan for rate in seam.curve]  # 0: no stream reaches so far from its seam
        axes.plot(times, rates, label=f"{seam.mode} ({seam.handoffs} handoffs)", marker=".", linewidth=1)
    axes.axvline(0.0, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds from main decode's first token")
    axes.set_ylabel("tokens per second and stream")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Output rate across the handoff\n{report.engine}; {report.line}", fontsize=10)
    axes.legend()
    plots.save(figure, path)
