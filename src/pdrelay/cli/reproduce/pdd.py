"""`pdrelay reproduce pdd`."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("pdd")
@click.option("--runs", type=click.IntRange(min=1), default=2, show_default=True, metavar="N",
              help="Simulate each deployment with so many seeds; the calibration is for 2.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes. Default: the machine's cores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a report with the figures.")  # fmt: skip
def command(runs: int, jobs: int | None, as_json: bool, html: Path | None) -> None:
    """Show PDD's published figures beside those that the simulator obtains.

    Rows are inputs, calibrated or predicted; a row that no model of the stated set-up can meet says why.
    """
    from pdrelay.cli.reproducing import show
    from pdrelay.cli.simulating import progress_bar
    from pdrelay.reproduce.pdd import figures, reproduce
    from pdrelay.reproduce.pdd_setup import ASSUMPTIONS

    with progress_bar(visible=not as_json) as bar:
        task = bar.add_task("simulating", total=None)
        report = reproduce(
            runs, jobs or os.cpu_count() or 1, lambda done, of: bar.update(task, completed=done, total=of)
        )
    show("PDD: published beside obtained", report.rows, figures(report), ASSUMPTIONS, html=html, as_json=as_json)
