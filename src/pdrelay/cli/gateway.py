"""`pdrelay gateway`: the OpenAI front end."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("gateway")
@click.option(
    "--config", "config", type=click.Path(path_type=Path), required=True, help="Deployment file, pdrelay.toml."
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def command(config: Path, as_json: bool) -> None:
    """Run the OpenAI-compatible gateway of a deployment until it is interrupted."""
    import json
    import logging

    import uvloop

    from pdrelay.cluster.config import load
    from pdrelay.gateway.run import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    deployment = load(config)
    url = f"http://{deployment.gateway.listen}/v1"
    click.echo(json.dumps({"url": url}) if as_json else f"serving {deployment.model.name} on {url}")
    uvloop.run(serve(deployment))
