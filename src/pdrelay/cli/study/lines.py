"""`pdrelay study lines`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("lines")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a report with break-even charts.")  # fmt: skip
def command(as_json: bool, html: Path | None) -> None:
    """Run PrfaaS's case study with each model of its Table 3 over thinner, longer and dearer lines.

    Each line has its own best threshold and split; the baseline is as many H20 instances as cost as much.
    """
    from pdrelay.cli.simulating import progress_bar
    from pdrelay.cli.studying import show
    from pdrelay.reproduce import distance

    with progress_bar(visible=not as_json) as bar:
        task = bar.add_task("models", total=len(distance.MODELS))
        found = []
        for model in distance.MODELS:
            found.append(distance.break_even(model))
            bar.update(task, advance=1)
    sentences = [*distance.sentences(found), *distance.ASSUMED]
    tables = [distance.table(found)]
    show(distance.as_dict(found), tables, sentences, lambda: distance.html(found), html=html, as_json=as_json)
