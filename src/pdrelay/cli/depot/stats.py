"""`pdrelay depot stats`: what running depots hold, and where engines had the KV of prompts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from pdrelay.depot.asking import Answer
    from pdrelay.depot.base import LinkEstimate

    Answers = dict[str, Answer]

TEXTS = {"depot", "engine", "disk tier", "link to", "payload by", "transfer", "to", "for"}
"""Columns that hold words."""

MOST_TRANSFERS = 20
"""Of each depot in the table."""


@click.command("stats")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Deployment file, pdrelay.toml.")
@click.option("--run-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Run directory whose file to take without --config. Default: that of `pdrelay up`.")  # fmt: skip
@click.option("--host", metavar="NAME", help="One host only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, by host.")
@click.pass_context
def command(ctx: click.Context, config: Path | None, run_dir: Path | None, host: str | None, as_json: bool) -> None:
    """Show pages, leases, transfers, links and hit rates by tier of running depots.

    Of live transfers the oldest are listed, with what they wait for: pages still to be produced, then the line.

    Depots of this machine are asked over their Unix socket, others over TLS with a certificate of the deployment
    file's directory. Exit code 1 when a depot does not answer.
    """
    import asyncio

    import msgspec

    from pdrelay.cluster.config import load
    from pdrelay.depot.asking import ask

    deployment = load(config or _running(run_dir))
    hosts = [deployment.host_named(host)] if host is not None else deployment.host
    answers = asyncio.run(ask(deployment, hosts))
    if as_json:
        click.echo(msgspec.json.encode(answers))
    else:
        _print(answers)
    ctx.exit(1 if any(answer.stats is None for answer in answers.values()) else 0)


def _running(run_dir: Path | None) -> Path:
    from pdrelay.cli.local.rundir import RunDirectory

    return (RunDirectory(run_dir) if run_dir is not None else RunDirectory.default()).config


def _print(answers: Answers) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_holdings(answers))
    console.print()
    console.print(_traffic(answers))
    if any(answer.progress for answer in answers.values()):
        console.print()
        console.print(_transfers(answers))
    if any(answer.stats is not None and answer.stats.links for answer in answers.values()):
        console.print()
        console.print(_links(answers))
    if any(answer.stats is not None and answer.stats.disk.state != "none" for answer in answers.values()):
        console.print()
        console.print(_disks(answers))
    if any(answer.stats is not None and answer.stats.use for answer in answers.values()):
        console.print()
        console.print(_tiers(answers))
    for host, answer in answers.items():
        if answer.stats is None:
            console.print(f"{host}: {answer.error}", markup=False, soft_wrap=True)


def _holdings(answers: Answers) -> Table:
    from pdrelay.cluster.units import size_text

    table = _table(
        "depot", "pages", "arena", "of", "leases", "transfers", "evicted", "waits", "corrupt pages", "corrupt parts"
    )
    for host, answer in answers.items():
        if (stats := answer.stats) is not None:
            sizes = size_text(stats.used_bytes), size_text(stats.capacity_bytes)
            counts = (stats.leases, stats.transfers, stats.evicted_pages, stats.reserve_waits)
            corrupt = stats.corrupt_pages, stats.corrupt_parts
            table.add_row(host, str(stats.pages), *sizes, *map(str, (*counts, *corrupt)))
    return table


def _traffic(answers: Answers) -> Table:
    """Parts exchanged with other depots, and what they took on the line: less where a link has a codec."""
    from pdrelay.cluster.units import size_text

    table = _table("depot", "sent", "on the line", "received", "on the line", "lossy pages")
    for host, answer in answers.items():
        if (stats := answer.stats) is not None:
            moved = (stats.sent_bytes, stats.sent_wire_bytes, stats.received_bytes, stats.received_wire_bytes)
            table.add_row(host, *map(size_text, moved), str(stats.lossy_pages))
    return table


def _links(answers: Answers) -> Table:
    """Where each depot sends, by what path, and what the line carries."""
    table = _table("depot", "link to", "payload by", "Mbit/s", "rtt ms", "sent again", "codec ratio", "queued", "busy")
    for host, answer in answers.items():
        for to, link in (answer.stats.links if answer.stats is not None else {}).items():
            path = link.state.path if link.state.up else f"down: {link.state.detail}"
            table.add_row(host, to, path, *(_estimate_cells(link.estimate) if link.estimate is not None else ()))
    return table


def _transfers(answers: Answers) -> Table:
    """The oldest live transfers of each depot, and how long they will still take."""
    from pdrelay.cluster.units import size_text

    table = _table("depot", "transfer", "to", "age s", "there", "of", "pages to come", "rest s", "for")
    for host, answer in answers.items():
        for told in answer.progress[:MOST_TRANSFERS]:
            rest = "" if told.seconds is None else f"{told.seconds:.1f}"
            sizes = size_text(told.done), size_text(told.total)
            use = "nobody" if told.background else "a request"
            table.add_row(host, told.xfer, told.to or "", f"{told.age:.1f}", *sizes, str(told.absent), rest, use)
        if (more := len(answer.progress) - MOST_TRANSFERS) > 0:
            table.add_row(host, f"and {more} more (--json)")
    return table


def _estimate_cells(found: LinkEstimate) -> Iterator[str]:
    from pdrelay.cluster.units import size_text

    yield f"{found.rate * 8 / 1e6:.1f}" if found.measured else f"({found.rate * 8 / 1e6:.1f})"  # as configured
    yield f"{found.rtt * 1e3:.1f}"
    yield f"{100 * found.loss:.2f} %"
    yield f"{found.ratio:.2f}"
    yield size_text(found.queued + found.queued_background)
    yield f"{100 * found.busy:.0f} %"


def _disks(answers: Answers) -> Table:
    from pdrelay.cluster.units import size_text

    table = _table("depot", "disk tier", "pages", "bytes", "of", "written", "read back", "evicted", "corrupt", "errors")
    for host, answer in answers.items():
        if answer.stats is not None and (disk := answer.stats.disk).state != "none":
            sizes = size_text(disk.used_bytes), size_text(disk.capacity_bytes)
            counts = (disk.written_pages, disk.restored_pages, disk.evicted_pages, disk.corrupt_pages, disk.errors)
            table.add_row(host, disk.state, str(disk.pages), *sizes, *map(str, counts))
    return table


def _tiers(answers: Answers) -> Table:
    """Shares of the tokens of all prompts, by where their KV came from."""
    table = _table(
        "depot", "engine", "requests", "prompt tokens", "own cache", "arena", "disk", "computed", "loaded again"
    )
    for host, answer in answers.items():
        for engine, use in (answer.stats.use if answer.stats is not None else {}).items():
            shares = [
                f"{100 * part / (use.tokens or 1):.1f} %" for part in (use.own, use.arena, use.disk, use.computed)
            ]
            table.add_row(host, engine, str(use.requests), str(use.tokens), *shares, str(use.reloaded))
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right", overflow="fold")
    return table
