"""`pdrelay study pairing`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("pairing")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a report with charts.")  # fmt: skip
def command(as_json: bool, html: Path | None) -> None:
    """Put each chip of PDD's Table 1, H100, H200 and H20 into each role and show what a request costs.

    Chips whose rates PDD prints come first, then with B and D, whose rates are assumed.
    """
    from pdrelay.cli.studying import show
    from pdrelay.reproduce import pairing

    known, every = pairing.study(), pairing.study(assumed=True)
    found = {"known": pairing.as_dict(known), "with_assumed": pairing.as_dict(every), "assumptions": pairing.ASSUMED}
    tables = [pairing.pair_table(known), pairing.role_table(every)]
    sentences = [*pairing.flips(known), "with B and D: " + pairing.flips(every)[0], *pairing.ASSUMED]
    show(found, tables, sentences, lambda: pairing.html(known, every), html=html, as_json=as_json)
