"""`pdrelay down`: stops what `up` started."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("down")
@click.option("--run-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Run directory of the deployment. Default: $XDG_STATE_HOME/pdrelay.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_dir: Path | None, as_json: bool) -> None:
    """Stop the deployment that `up` started.

    Leaves no process, port, socket or shared memory behind; logs and certificates stay. Succeeds when nothing runs.
    """
    from pdrelay.cli.local.attach import take_down
    from pdrelay.cli.local.rundir import RunDirectory

    run = RunDirectory(run_dir) if run_dir is not None else RunDirectory.default()
    stopped = take_down(run)
    if as_json:
        click.echo(json.dumps({"stopped": stopped, "run_directory": str(run.path)}))
    else:
        click.echo(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {run.path}")
