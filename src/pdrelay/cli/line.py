"""`pdrelay line`: the wide-area line of a deployment on one machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("line")
@click.option("--config", "config_path", required=True, metavar="FILE",
              type=click.Path(path_type=Path, dir_okay=False), help="Deployment file.")  # fmt: skip
@click.option("--rate", metavar="RATE", help="Rate of each direction, such as 20mbit; 0 or unlimited for none. "
              "Default: the slowest link of the file.")  # fmt: skip
@click.option("--rtt", metavar="TIME", help="Round-trip time, such as 30ms. Default: that of the same link.")
@click.option("--admin", metavar="ADDRESS", default="127.0.0.1:0", show_default=True,
              help="Address of GET /metrics, POST /rate?value=40mbit, POST /rtt?value=80ms and POST /cut.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the routes as one JSON object.")
def command(config_path: Path, rate: str | None, rtt: str | None, admin: str, as_json: bool) -> None:
    """Run a shaped line in user space, standing in for a wide-area network.

    Listens where the deployment's links, hosts and instances are reached, and forwards to where they listen. Control
    connections go ahead of bulk connections; bulk connections take turns. Runs until SIGTERM or Ctrl-C.
    """
    from pdrelay.wan import serve

    settings = serve.settings(config_path, rate, rtt, admin)
    click.echo(serve.describe(settings, as_json))
    serve.run(settings)
