"""A gateway report as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pdrelay.bench.failures import failed
from pdrelay.bench.relay.run import Report, Row


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    machine = report.machine
    console.print(
        f"{report.command}: {machine.date}, {machine.cores} cores of {machine.processor}, Linux {machine.kernel}, "
        f"Python {machine.python}, load before {machine.load_before}"
    )
    console.print(
        f"Medians of {report.rounds} launches each, in turn; gateway on one core, engines and clients on another "
        f"({report.cores}). Lockstep: a token is made when its client has read the one before."
    )
    table = Table("", "tokens/s, 64 and 256 streams", "of a core", "CPU s per M tokens", "added TTFT ms, P50 and P99",
                  "added ms a token", "of a core at 256 x 50/s", "MB", box=None, pad_edge=False)  # fmt: skip
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in report.rows:
        if row.tokens_ratio is not None and row.cpu_ratio is not None:
            console.print(
                f"ours beside {row.name} in the same round: tokens/s x {row.tokens_ratio.text()}, "
                f"CPU per token x {row.cpu_ratio.text()}"
            )
    for line in failed(report.failures):
        console.print(line, markup=False)


def _cells(row: Row) -> list[str]:
    found = row.medians
    return [
        f"{row.name} {row.version}".strip(),
        f"{found.tokens_per_s_64:,.0f}  {found.tokens_per_s_256:,.0f}",
        f"{found.gateway_core_share:.0%}",
        f"{found.cpu_s_per_m_tokens:.1f}",
        f"{row.added_ttft_ms_p50:.2f}  {row.added_ttft_ms_p99:.2f}",
        f"{row.added_lag_ms_p50:.2f}",
        f"{found.core_share_paced:.1%}",
        f"{found.memory_mb:.0f}",
    ]
