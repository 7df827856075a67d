"""How `pdrelay reproduce` shows what it obtained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from pdrelay.cli.simulating import wide_console
from pdrelay.reproduce.page import HEAD, cells, reasons
from pdrelay.reproduce.page import html as page
from pdrelay.reproduce.rows import Assumption, Row
from pdrelay.ui.page import write


def show(
    title: str,
    rows: Sequence[Row],
    charts: Sequence[tuple[str, str]],
    assumptions: Sequence[Assumption],
    *,
    html: Path | None,
    as_json: bool,
) -> None:
    """Prints a table or one JSON object, and writes the report where it is wanted. Raises ConfigError."""
    if html is not None:
        write(html, page(title, rows, charts, assumptions))
    if as_json:
        found = {"rows": [row.as_dict() for row in rows], "assumptions": [each._asdict() for each in assumptions]}
        click.echo(json.dumps(found, indent=2))
        return
    console = wide_console()
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*cells(row), style="dim" if row.kind != "predicted" else None)
    console.print(table)
    for reason in reasons(rows):
        console.print(reason, highlight=False, markup=False)
    console.print("assumed: " + "; ".join(f"{a.name} {a.value} ({a.origin})" for a in assumptions), highlight=False)
