"""`pdrelay plan`: the best deployment for a workload, prices, lines and service levels."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("plan")
@click.argument("plan", metavar="PLAN")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE",
              help="Change the plan file, such as promise.ttft=8s or pool.h20.count=12.")  # fmt: skip
@click.option("--trace", metavar="FILE", type=_FILE, help="Take lengths and hit rates from this trace.")
@click.option("--verify", is_flag=True, help="Run the best few plans in the simulator and show the difference.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=4.0, show_default=True,
              help="Time for the search around what was found.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", metavar="FILE", type=_FILE, help="Write a report with figures.")
@click.option("--config", metavar="FILE", type=_FILE, help="Write the deployment file, pdrelay.toml.")
@click.option("--commands", is_flag=True, help="Print the command line of each kind of engine, too.")
def command(
    plan: str,
    changes: tuple[str, ...],
    trace: Path | None,
    verify: bool,
    seconds: float,
    as_json: bool,
    html: Path | None,
    config: Path | None,
    commands: bool,
) -> None:
    """Find the best deployment for what a plan file describes.

    PLAN is a .toml file (see docs/planner.md) or the name of a shipped one, such as prfaas or trio. What cannot be
    kept is named, with the nearest that can; the exit code is then 1.
    """
    from pdrelay.cli.planning import Wanted, run
    from pdrelay.plan.files import find

    found = list(changes)
    if trace is not None:
        found += [f"workload.trace='{trace.resolve()}'", "samples=0"]
    run(find(plan), found, Wanted(verify, seconds, as_json, html, config, commands))
