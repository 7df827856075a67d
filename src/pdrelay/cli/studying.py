"""How `pdrelay study` shows what it found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table as Grid

from pdrelay.cli.simulating import wide_console
from pdrelay.ui.page import Table, write


def show(
    found: dict[str, Any],
    tables: Sequence[Table],
    sentences: Sequence[str],
    page: Callable[[], str],
    *,
    html: Path | None,
    as_json: bool,
) -> None:
    """Prints tables and sentences or one JSON object; writes the report that `page` makes. Raises ConfigError."""
    if html is not None:
        write(html, page())
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    console = wide_console()
    for table in tables:
        grid = Grid(*[str(head) for head in table.head])
        for row in table.rows:
            grid.add_row(*[str(cell) for cell in row])
        console.print(grid)
    for sentence in sentences:
        console.print(f"{sentence}.".replace("..", "."), highlight=False, markup=False)
