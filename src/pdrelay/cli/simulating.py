"""What `pdrelay simulate` does and prints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pdrelay.errors import ConfigError
from pdrelay.sim.perfetto import PerfettoWriter
from pdrelay.sim.record import Record
from pdrelay.sim.report import TIMES, html
from pdrelay.sim.running import Job, Run, combinations, parse_sweep, run, run_all
from pdrelay.ui.page import write
from pdrelay.workload.choice import Load


class Files(NamedTuple):
    """Where to write what; None is nowhere."""

    records: Path | None = None
    html: Path | None = None
    perfetto: Path | None = None


def once(job: Job, files: Files, *, as_json: bool) -> None:
    """Runs a scenario and prints what it measured. Raises ConfigError."""
    started = time.perf_counter()
    with ExitStack() as stack:
        takers: list[Callable[[Record], None]] = []
        if files.records is not None:
            takers.append(_writer(files.records, stack))
        if files.perfetto is not None:
            trace = PerfettoWriter(files.perfetto)
            stack.callback(trace.close)
            takers.append(trace.add)
        bar = stack.enter_context(progress_bar(visible=not as_json))
        ended = _run(job, takers, bar)
    seconds = time.perf_counter() - started
    if files.html is not None:
        write(files.html, html(f"pdrelay simulate {job.path.stem}", ended.outcome, ended.comparisons))
    if as_json:
        click.echo(json.dumps(_json(ended, seconds), indent=2))
    else:
        _show(ended, seconds)


def _run(job: Job, takers: list[Callable[[Record], None]], bar: Progress) -> Run:
    task = bar.add_task(job.path.stem, total=None)

    def take(record: Record) -> None:
        for taker in takers:
            taker(record)

    def loaded(load: Load) -> None:
        bar.update(task, total=load.number)

    ended = run(job, take if takers else None, lambda done: bar.update(task, completed=done), loaded)
    bar.update(task, completed=ended.load.number)
    return ended


def sweep(job: Job, sweeps: list[str], processes: int, *, as_json: bool) -> None:
    """Runs a scenario once for each combination of values and prints a line for each. Raises ConfigError."""
    points = combinations(job, [parse_sweep(text) for text in sweeps])
    found: list[dict[str, Any]] = []
    with progress_bar(visible=not as_json) as bar:
        task = bar.add_task("sweep", total=len(points))
        for figures in run_all([each for _, each in points], processes):
            found.append(figures)
            bar.update(task, advance=1)
    rows = [{"parameters": point, "result": figures} for (point, _), figures in zip(points, found, strict=True)]
    if as_json:
        click.echo(json.dumps({"scenario": job.path.stem, "runs": rows}, indent=2))
        return
    table = Table(*points[0][0], *(label for label, _ in COLUMNS))
    for row in rows:
        table.add_row(*row["parameters"].values(), *(show(row["result"]) for _, show in COLUMNS))
    wide_console().print(table)


Figures = dict[str, Any]


def _milliseconds(key: str) -> Callable[[Figures], str]:
    return lambda figures: f"{figures[key] / 1e3:.3f}"


COLUMNS: list[tuple[str, Callable[[Figures], str]]] = [
    ("requests/s", lambda figures: f"{figures['request_throughput']:.2f}"),
    ("good/s", lambda figures: f"{figures['request_goodput']:.2f}"),
    ("TTFT P50 s", _milliseconds("median_ttft_ms")),
    ("P90", _milliseconds("p90_ttft_ms")),
    ("P99", _milliseconds("p99_ttft_ms")),
    ("TTST P90 s", _milliseconds("p90_ttst_ms")),
    ("TPOT P90 s", _milliseconds("p90_tpot_ms")),
    ("relay share", lambda figures: f"{figures['output_share']['relay']:.1%}"),
    ("line use", lambda figures: " ".join(f"{line['utilisation']:.0%}" for line in figures["lines"].values()) or "-"),
]


def _show(ended: Run, seconds: float) -> None:
    console, outcome = wide_console(), ended.outcome
    figures = outcome.as_dict()
    _complain(ended.load, console)
    if ended.comparisons:
        table = Table("workload", "published", "here", "error", "source")
        for each in ended.comparisons:
            table.add_row(
                each.quantity, f"{each.published:,.4g}", f"{each.obtained:,.4g}", f"{each.error:+.1%}", each.source
            )
        console.print(table)
    table = Table("seconds", "mean", "P50", "P90", "P99", "most")
    for name, label in TIMES.items():
        digest = outcome.metrics.digests[name]
        values = [digest.mean, *digest.percentiles([50, 90, 99]), digest.largest if digest.count else 0.0]
        table.add_row(label, *(f"{value:,.3f}" for value in values))
    console.print(table)
    for line in _sentences(figures, seconds):
        console.print(line, highlight=False)


def _sentences(figures: Figures, seconds: float) -> list[str]:
    shares = ", ".join(f"{tier} {share:.1%}" for tier, share in figures["output_share"].items())
    lines = [
        f"{figures['completed']:,} of {figures['completed'] + figures['failed']:,} requests in "
        f"{figures['duration']:,.1f} s: {figures['request_throughput']:.3f} requests/s, "
        f"{figures['request_goodput']:.3f} good, {figures['output_throughput']:,.0f} tokens/s",
        f"output by {shares}; {figures['handoffs']:,} handoffs",
    ]
    for name, line in figures["lines"].items():
        lines.append(
            f"line {name}: {line['utilisation']:.1%} of {line['rate'] * 8e-9:.3g} Gbit/s, "
            f"{line['connection_utilisation']:.1%} of its connections"
        )
    return [*lines, f"simulated in {seconds:.1f} s"]


def wide_console() -> Console:
    """The terminal; a file or a pipe is wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _complain(load: Load, console: Console) -> None:
    if load.skipped:
        console.print(f"{load.skipped:,} rows of the trace were left out:", highlight=False)
        for complaint in load.complaints:
            console.print(f"  {complaint}", highlight=False, markup=False)


def _json(ended: Run, seconds: float) -> dict[str, Any]:
    return {
        **ended.outcome.as_dict(),
        "workload": [each._asdict() for each in ended.comparisons],
        "skipped_rows": ended.load.skipped,
        "simulation_seconds": seconds,
    }


def _writer(path: Path, stack: ExitStack) -> Callable[[Record], None]:
    try:
        file = stack.enter_context(path.open("w"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return lambda record: print(json.dumps(record.as_dict()), file=file)


def progress_bar(*, visible: bool) -> Progress:
    """A bar on stderr, when that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not (visible and console.is_terminal))
