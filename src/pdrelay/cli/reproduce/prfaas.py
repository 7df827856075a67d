"""`pdrelay reproduce prfaas`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("prfaas")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a report with Figures 5a and 5b.")  # fmt: skip
def command(as_json: bool, html: Path | None) -> None:
    """Show PrfaaS's published figures beside those of the throughput model and its search.

    Rows are inputs, calibrated or predicted. Nothing is simulated: in the paper, too, Table 6 is computed.
    """
    from pdrelay.cli.reproducing import show
    from pdrelay.reproduce.prfaas import figures, reproduce
    from pdrelay.reproduce.prfaas_setup import ASSUMPTIONS

    report = reproduce()
    title = "PrfaaS: published beside obtained"
    show(title, report.rows, figures(report.grid), ASSUMPTIONS, html=html, as_json=as_json)
