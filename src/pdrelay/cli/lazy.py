"""A group of commands whose files are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands of one package: `commands` maps each name to its line of help, the code is in `<package>.<name>`."""

    def __init__(self, *args: Any, table: Mapping[str, str], package: str, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.table, self.package = table, package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the file of one command, which holds it as `command`."""
        if cmd_name not in self.table:
            return None
        module = importlib.import_module(f"{self.package}.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.table.items()))
