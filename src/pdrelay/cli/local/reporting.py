"""What `status` shows: parts, health as the gateway sees it, counters of depots and line."""

from __future__ import annotations

import asyncio
import re
import time

import msgspec
from rich.console import Console
from rich.table import Table

from pdrelay.cli.local.probe import InstanceRow, http_get, read_health
from pdrelay.cli.local.rundir import PartState, RunDirectory, RunState, exit_text
from pdrelay.cluster.units import parse_address

_SAMPLE = re.compile(r"(pdrelay_\w+(?:\{[^}]*\})?) (\S+)")

_PARITY = "pdrelay_gateway_cache_parity"
"""The rest of the gateway's metrics is for Prometheus."""


class Report(msgspec.Struct, kw_only=True):
    """Everything that is known of a deployment now."""

    running: bool
    healthy: bool
    run_directory: str
    state: RunState | None
    instances: list[InstanceRow]
    counters: dict[str, dict[str, float]]  # by part


def show(run: RunDirectory, as_json: bool) -> bool:
    """Prints the report; whether everything is well."""
    report = asyncio.run(gather(run))
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    return report.healthy


async def gather(run: RunDirectory) -> Report:
    """Asks state file, gateway, depots and line."""
    running, state = run.running, run.read_state()
    instances, counters = await _ask(state) if running and state is not None else ([], {})
    healthy = running and state is not None and state.healthy and all(row.healthy for row in instances)
    return Report(
        running=running,
        healthy=healthy and bool(instances),
        run_directory=str(run.path),
        state=state,
        instances=instances,
        counters=counters,
    )


async def _ask(state: RunState) -> tuple[list[InstanceRow], dict[str, dict[str, float]]]:
    addresses = {part.name: part.metrics for part in state.parts if part.metrics and part.condition == "ready"}
    gateway = next((part.address for part in state.parts if part.kind == "gateway"), "")
    health, of_gateway, *texts = await asyncio.gather(
        _get(gateway, "/health"),
        _get(gateway, "/metrics"),
        *(_get(address, "/metrics") for address in addresses.values()),
    )
    parity = {key: value for key, value in _counters(of_gateway).items() if key.startswith(_PARITY)}
    try:
        instances = read_health(health)
    except msgspec.DecodeError:
        instances = []
    counters = {name: _counters(text) for name, text in zip(addresses, texts, strict=True)}
    return instances, counters | ({"gateway": parity} if parity else {})


async def _get(address: str, path: str) -> bytes:
    try:
        async with asyncio.timeout(2):
            return await http_get(*parse_address(address), path)
    except (OSError, ValueError, TimeoutError):
        return b""


def _counters(text: bytes) -> dict[str, float]:
    """Samples of Prometheus text whose names are ours."""
    rows = (_SAMPLE.fullmatch(line) for line in text.decode(errors="replace").splitlines())
    return {row[1]: float(row[2]) for row in rows if row is not None}


def _print(report: Report) -> None:
    console = Console(highlight=False)
    if report.state is None or not report.running:
        console.print(f"nothing runs in {report.run_directory}", soft_wrap=True)
        if report.state is not None and report.state.failure:
            console.print(f"the last start failed: {report.state.failure}", markup=False, soft_wrap=True)
        return
    console.print(_parts_table(report))
    for name, counters in report.counters.items():
        row = ", ".join(f"{_short(key, name)} {value:g}" for key, value in counters.items())
        console.print(f"{name}: {row}", soft_wrap=True, markup=False)
    console.print(
        f"{report.state.phase} on {report.state.url}, {'all well' if report.healthy else 'something is down'}"
    )


def _parts_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("part", "kind", "state", "pid", "uptime", "address", ""):
        table.add_column(column, overflow="fold")
    rows = {row.instance: row for row in report.instances}
    assert report.state is not None
    for part in report.state.parts:
        uptime = "" if part.started is None or part.ended is not None else _duration(time.time() - part.started)
        pid = str(part.pid) if part.pid is not None and part.ended is None else ""
        table.add_row(part.name, part.kind, part.condition, pid, uptime, part.address, _note(part, rows.get(part.name)))
    return table


def _note(part: PartState, row: InstanceRow | None) -> str:
    if part.condition == "exited":
        return f"{exit_text(part.exit_code)}: {part.last_line}"
    if row is not None:
        return (
            (f"healthy, but {row.alarm}" if row.alarm else "healthy") if row.healthy else f"not healthy: {row.detail}"
        )
    return ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _short(sample: str, part: str) -> str:
    """A sample's name without what the part's name says already."""
    name, _, labels = re.sub(r"^pdrelay_(depot_|line_|gateway_)?", "", sample).partition("{")
    kept = [label for label in labels.rstrip("}").split(",") if label and label != f'depot="{part}"']
    return " ".join([name, *(label.partition("=")[2].strip('"') for label in kept)])
