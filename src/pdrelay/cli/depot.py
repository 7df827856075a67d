"""`pdrelay depot`: the depot of one host."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("depot")
@click.option(
    "--config", "config", type=click.Path(path_type=Path), required=True, help="Deployment file, pdrelay.toml."
)
@click.option("--name", required=True, metavar="HOST", help="Which host of the file this is.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as JSON.")
def command(config: Path, name: str, as_json: bool) -> None:
    """Run the depot of one host until it is interrupted."""
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
