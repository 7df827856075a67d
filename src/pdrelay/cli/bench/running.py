"""Runs a benchmark: progress on a terminal, what was measured on every way out, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import msgspec
from rich.console import Console

from pdrelay.bench import signals

Progress = Callable[[str], None]
_IN_CHECKOUT = Path("benchmarks", "peers")
FILE_COLUMNS = 160  # of tables that go into a file or a pipe


class Report(Protocol):
    """What every benchmark's report has."""

    command: str
    failures: dict[str, str]


R = TypeVar("R", bound=Report)


def measure(
    report: R,
    work: Callable[[Progress], Coroutine[Any, Any, None]],
    show: Callable[[R, Console], None],
    as_json: bool,
    plain: Callable[[R], object] = lambda report: report,
) -> int:
    """Runs `work`, which fills `report`, and prints the report; 1 when a part of it failed. `plain`: what JSON says."""
    errors = Console(stderr=True)
    try:
        if errors.is_terminal:
            with errors.status(report.command, spinner="line") as status:
                signals.run(work(lambda news: status.update(f"{report.command}: {news}")))
        else:
            signals.run(work(lambda _: None))
    except KeyboardInterrupt:
        report.failures["run"] = "interrupted"
        raise
    finally:
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(plain(report)), indent=1))
        else:
            console = Console(soft_wrap=True)
            show(report, console if console.is_terminal else Console(soft_wrap=True, width=FILE_COLUMNS))
    return 1 if report.failures else 0


def given(context: click.Context) -> list[str]:
    """The options that differ from their defaults, as they were given."""
    found = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE and name != "as_json":
            value = context.params[name]
            for each in value if isinstance(value, tuple) else (value,):
                found += [parameter.opts[0]] if each is True else [parameter.opts[0], str(each)]
    return found


def default_peers() -> Path:
    """Below the working directory, or in the checkout that this package is part of."""
    checkout = Path(__file__).resolve().parents[4] / _IN_CHECKOUT
    return checkout if checkout.is_dir() and not _IN_CHECKOUT.is_dir() else _IN_CHECKOUT
