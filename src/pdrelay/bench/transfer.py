"""`pdrelay bench transfer`: its parts, run one after another; what one part cannot do does not lose the others."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdrelay.bench import fleet, line
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.settings import Place, Progress, Settings
from pdrelay.bench.shaped import Shaped, shaped
from pdrelay.bench.soak import Soak, soak
from pdrelay.bench.table2 import Table2
from pdrelay.bench.table2_run import table2
from pdrelay.bench.throughput import Row
from pdrelay.bench.unshaped import Throughput, throughput
from pdrelay.errors import PdrelayError

LONGEST_DIRECTORY = 40


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "transfer"
    machine: Machine
    command: str
    throughput: Throughput | None = None
    shaped: Shaped | None = None
    table2: Table2 | None = None
    soak: Soak | None = None
    failures: dict[str, str] = {}


def new_report(command: str) -> Report:
    """A report without results."""
    return Report(machine=describe(), command=command)


async def run(settings: Settings, report: Report, progress: Progress) -> None:
    """Fills `report`, failures included. Raises ConfigError for settings that cannot work here."""
    line.require(settings.line)
    with tempfile.TemporaryDirectory(prefix="pdrelay-bench-", dir=_short_directory()) as scratch:
        directory = Path(scratch)
        tls = fleet.make_certificates(directory)
        for part in settings.parts:
            home = directory / part
            home.mkdir()
            try:
                await _measure(part, settings, report, Place(home, tls), progress)
            except (PdrelayError, OSError, TimeoutError) as error:
                report.failures[part] = str(error) or type(error).__name__


def _short_directory() -> str:
    """The directory for temporary files, or /tmp where that one's name would make Unix sockets' names too long."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_DIRECTORY else "/tmp"  # noqa: S108 - a fresh private directory is made in it


async def _measure(part: str, settings: Settings, report: Report, place: Place, progress: Progress) -> None:
    def tell(news: str) -> None:
        progress(f"{part}: {news}")

    if part == "throughput":
        report.throughput = await throughput(settings, place, tell)
        _note_failed(report, part, report.throughput.rows)
    elif part == "shaped":
        report.shaped = await shaped(settings, place, tell)
        _note_failed(report, part, report.shaped.rows)
    elif part == "table2":
        report.table2 = await table2(settings, place, tell)
        report.failures |= {f"{part}, {arm}": reason for arm, reason in report.table2.failures.items()}
    elif part == "soak":
        report.soak = await soak(settings.soak, place, tell)
        if not report.soak.flat:
            report.failures[part] = "memory grows or something is left behind"


def _note_failed(report: Report, part: str, rows: Sequence[Row]) -> None:
    report.failures |= {f"{part}, {row.name}": row.detail for row in rows if row.status == "failed"}
