"""`pdrelay depot`: runs the depot of one host; `pdrelay depot stats` shows what depots hold."""

from __future__ import annotations

from pathlib import Path

import click

from pdrelay.cli.lazy import LazyGroup

COMMANDS = {
    "stats": "Show pages, leases, transfers and hit rates by tier of running depots.",
}
"""Subcommand to its line in `pdrelay depot --help`; the code is in `pdrelay.cli.depot.<name>`."""


@click.group("depot", cls=LazyGroup, table=COMMANDS, package="pdrelay.cli.depot", invoke_without_command=True)
@click.option("--config", "config", type=click.Path(path_type=Path), help="Deployment file, pdrelay.toml.")
@click.option("--name", metavar="HOST", help="Which host of the file this is.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
@click.pass_context
def command(ctx: click.Context, config: Path | None, name: str | None, as_json: bool) -> None:
    """Run the depot of one host until it is interrupted; with a subcommand, do that instead."""
    if ctx.invoked_subcommand is not None:
        if config is not None or name is not None or as_json:
            raise click.UsageError(f"options go after `{ctx.invoked_subcommand}`")
        return
    if config is None or name is None:
        raise click.UsageError(f"missing option '{'--config' if config is None else '--name'}'")
    _run(config, name, as_json)


def _run(config: Path, name: str, as_json: bool) -> None:
    import json
    import logging

    import uvloop

    from pdrelay.cluster.config import load
    from pdrelay.depot.process import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    deployment = load(config)
    host = deployment.host_named(name)

    def ready() -> None:
        where = {"depot": name, "socket": host.socket, "listen": host.listen, "metrics": host.metrics}
        click.echo(json.dumps(where) if as_json else f"depot {name} serves {host.socket} and {host.listen}")

    uvloop.run(serve(deployment, name, ready))
