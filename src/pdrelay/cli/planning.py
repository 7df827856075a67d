"""What `pdrelay plan` does and prints."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from pdrelay.cli.simulating import progress_bar, wide_console
from pdrelay.cluster import config as deployment_file
from pdrelay.engine.vllm import launch
from pdrelay.plan.files import Case, load
from pdrelay.plan.problem import Plan
from pdrelay.plan.report import front_table, html, neighbour_table, sensitivity_table, verified_table
from pdrelay.plan.study import Study, as_dict, study, text_of
from pdrelay.plan.write import deployment_text
from pdrelay.ui import page
from pdrelay.ui.terminal import scatter


class Wanted(NamedTuple):
    """What to do beside planning, and where to write what; None is nowhere."""

    verify: bool
    seconds: float
    as_json: bool
    html: Path | None
    config: Path | None
    commands: bool


def run(path: Path, changes: list[str], wanted: Wanted) -> None:
    """Plans and prints. Raises ConfigError; ends with 1 when nothing does what is asked for."""
    case = load(path, changes)
    with progress_bar(visible=not wanted.as_json) as bar:
        bar.add_task("planning", total=None)
        found = study(case.problem, check=wanted.verify, seconds=wanted.seconds)
    if wanted.html is not None:
        page.write(wanted.html, html(f"pdrelay plan {path.stem}", found))
    text, lines = "", {}
    if not found.reasons:
        text = deployment_text(case, found.best.plan)
        lines = command_lines(text, found.best.plan) if wanted.commands or wanted.as_json else {}
        if wanted.config is not None:
            page.write(wanted.config, text)
    if wanted.as_json:
        click.echo(json.dumps(_finite({**as_dict(found), "deployment": text, "commands": lines}), indent=2))
    else:
        _show(case, found, lines)
    if found.reasons:
        sys.exit(1)


def command_lines(text: str, plan: Plan) -> dict[str, str]:
    """The vLLM command line of the first instance of each pool and role; the others differ in name and address."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pdrelay.toml"
        path.write_text(text)
        deployment = deployment_file.load(path)
        found = {}
        for (pool, role), count in plan.counts.items():
            if count:
                line = launch.command(deployment, f"{pool}-{role.value}-0")
                found[f"{pool} {role.value}"] = str(line).replace(f"{path.resolve().parent}/", "").replace(
                    sys.executable, "python", 1
                )  # fmt: skip
        return found


def _show(case: Case, found: Study, lines: dict[str, str]) -> None:
    console = wide_console()
    if case.file.description:
        console.print(case.file.description, highlight=False, style="dim")
    if found.reasons:
        for reason in found.reasons:
            console.print(f"not feasible: {reason.sentence}", highlight=False, markup=False)
            if reason.worth is not None:
                console.print(f"  nearest: {text_of(reason.worth.plan)}", highlight=False, markup=False)
        return
    for sentence in _summary(found):
        console.print(sentence, highlight=False, markup=False)
    points = [(worth.cost, worth.goodput) for worth in found.optimum.front]
    best = (found.best.cost, found.best.goodput)
    console.print(scatter(points, best, "cost of an hour", "requests/s"), highlight=False, markup=False)
    for title, table in (
        ("plans that no other beats", front_table(found.optimum.front)),
        ("neighbours", neighbour_table(found)),
        ("when conditions change", sensitivity_table(found)),
    ):
        _table(console, title, table)
    for worth, verified in found.verified:
        _table(console, f"simulated: {text_of(worth.plan)}", verified_table(verified))
        for text in verified.reasons:
            console.print(text, highlight=False, markup=False)
    for name, line in lines.items():
        console.print(f"{name}:\n  {line}", highlight=False, markup=False, soft_wrap=True)


def _summary(found: Study) -> list[str]:
    best, times = found.best, found.times
    sentences = [
        text_of(best.plan),
        f"{best.goodput:.3f} requests/s with the promise kept, {best.cost:,.2f} an hour, {best.ratio:,.1f} requests "
        f"for each unit of price; full first: {found.binding}",
        f"offloaded {best.rates.offloaded:.1%}, egress {best.rates.egress * 8e-9:.2f} Gbit/s; stages carry "
        f"{best.rates.offload:.3f} remote, {best.rates.local:.3f} local, {best.rates.decode:.3f} decode",
    ]
    if times is not None:
        sentences.append(
            f"TTFT mean {times.ttft_mean:.2f} s, P90 {times.ttft[1]:.2f} s; TTST mean {times.ttst_mean:.2f} s, P90 "
            f"{times.ttst[1]:.2f} s; {times.tpot * 1e3:.1f} ms a token"
        )
    sentences.append(
        f"{found.optimum.method} search, {found.optimum.examined:,} plans evaluated in {found.optimum.seconds:.1f} s"
    )
    return sentences


def _table(console: Console, title: str, rows: page.Table) -> None:
    table = Table(*[str(head) for head in rows.head], title=title, title_justify="left")
    for row in rows.rows:
        table.add_row(*[str(cell) for cell in row])
    console.print(table)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: None."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
