"""`pdrelay status`: what runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("status")
@click.option("--run-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Run directory of the deployment. Default: $XDG_STATE_HOME/pdrelay.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, run_dir: Path | None, as_json: bool) -> None:
    """Show the parts of a running deployment and their counters.

    Exit code 0 when everything runs and every engine is healthy, 1 when something is down or nothing runs.
    """
    from pdrelay.cli.local.reporting import show
    from pdrelay.cli.local.rundir import RunDirectory

    run = RunDirectory(run_dir) if run_dir is not None else RunDirectory.default()
    ctx.exit(0 if show(run, as_json) else 1)
