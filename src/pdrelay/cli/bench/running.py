"""Runs a benchmark: progress on a terminal, what was measured on every way out, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import click
import msgspec
from rich.console import Console

from pdrelay.bench import report as text
from pdrelay.bench import signals
from pdrelay.bench.transfer import Report

Progress = Callable[[str], None]


def measure(report: Report, work: Callable[[Progress], Coroutine[Any, Any, None]], as_json: bool) -> int:
    """Runs `work`, which fills `report`, and prints the report; 1 when a part of it failed."""
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
        _print(report, as_json)
    return 1 if report.failures else 0


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=1))
    else:
        text.show(report, Console(soft_wrap=True))
