"""A transfer report as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pdrelay.bench import table2_text
from pdrelay.bench.failures import failed
from pdrelay.bench.shaped import Shaped
from pdrelay.bench.soak import Soak
from pdrelay.bench.throughput import Row
from pdrelay.bench.transfer import Report
from pdrelay.bench.unshaped import Throughput


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    machine = report.machine
    console.print(
        f"{report.command}: {machine.date}, {machine.cores} cores of {machine.processor}, Linux {machine.kernel}, "
        f"Python {machine.python}, load before {machine.load_before}"
    )
    if report.throughput is not None:
        _throughput(report.throughput, console)
    if report.shaped is not None:
        _shaped(report.shaped, console)
    if report.table2 is not None:
        table2_text.show(report.table2, console)
    if report.soak is not None:
        _soak(report.soak, console)
    for line in failed(report.failures):
        console.print(line, markup=False)


def _throughput(result: Throughput, console: Console) -> None:
    console.print(
        f"\nThroughput on this machine: {result.connections} connections, {result.bytes / 2**20:.0f} MiB a round, "
        f"medians of {result.rounds} rounds (95 % interval), checksums on in pdrelay"
    )
    _rows(result.rows, console)


def _shaped(result: Shaped, console: Console) -> None:
    where = "two network namespaces (tbf)" if result.line == "namespaces" else "user space"
    console.print(
        f"\nShaped line of {result.rate * 8 / 1e6:g} Mbit/s, round trip {result.rtt * 1e3:g} ms, in {where}: "
        f"{result.connections} connections, {result.bytes / 2**20:.0f} MiB a round, medians of {result.rounds} rounds"
    )
    if result.note:
        console.print(result.note, markup=False)
    _rows(result.rows, console)


def _soak(result: Soak, console: Console) -> None:
    console.print(f"\nMemory of the depots over {result.transfers} transfers in {result.seconds:.0f} s")
    table = Table("", "start", "quarter", "end", "growth a transfer", "at most", box=None, pad_edge=False)
    for side, slope in (("sender", result.sender), ("receiver", result.receiver)):
        marks = [result.samples[at] for at in (0, len(result.samples) // 4, -1)]
        sizes = [f"{getattr(mark, side).anonymous / 1e6:.1f} MB" for mark in marks]
        table.add_row(side, *sizes, f"{slope.text(2)} bytes", f"{result.limit:g}")
    console.print(table)
    left = ", ".join(f"{name} {count}" for name, count in result.left_behind.items())
    console.print(f"left behind: {left or 'nothing'}; memory {'is flat' if result.flat else 'is NOT flat'}")


def _rows(rows: Sequence[Row], console: Console) -> None:
    table = Table("", "GB/s", "beside", "ratio in the same round", "CPU s per GB, both ends", box=None, pad_edge=False)
    for row in rows:
        if row.bytes_per_second is None:
            table.add_row(row.name, row.status)
            continue
        assert row.cpu_seconds_per_gb is not None
        ratio = row.ratio.text() if row.ratio is not None else ""
        rate = f"{row.bytes_per_second.value / 1e9:.3f}"
        table.add_row(row.name, rate, row.beside, ratio, f"{row.cpu_seconds_per_gb:.2f}")
    console.print(table)
    for row in rows:
        if row.detail:
            console.print(f"{row.status}: {row.name}: {row.detail}", markup=False)
