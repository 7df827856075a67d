"""`pdrelay gateway`: the OpenAI front end."""

from __future__ import annotations

from pathlib import Path

import click

_PATH = click.Path(path_type=Path)


@click.command("gateway")
@click.option("--config", "config", type=_PATH, required=True, help="Deployment file, pdrelay.toml.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N",
              help="Processes on the one address. Default: gateway.workers of the file.")  # fmt: skip
@click.option("--worker", type=int, hidden=True, help="Number of this process among several.")
@click.option("--worker-directory", type=_PATH, hidden=True, help="Where they find each other.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def command(config: Path, workers: int | None, worker: int | None, worker_directory: Path | None, as_json: bool) -> int:
    """Run the OpenAI-compatible gateway of a deployment until it is interrupted."""
    import json
    import logging
    import sys

    import uvloop

    from pdrelay.cluster.config import load
    from pdrelay.gateway import workers as processes
    from pdrelay.gateway.run import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    deployment = load(config)
    if worker is not None and worker_directory is not None:
        processes.end_with_parent()
        uvloop.run(serve(deployment, processes.Worker(worker, worker_directory)))
        return 0
    url = f"http://{deployment.gateway.listen}/v1"
    click.echo(json.dumps({"url": url}) if as_json else f"serving {deployment.model.name} on {url}")
    if (count := workers or deployment.gateway.workers) > 1:
        own = [sys.executable, "-m", "pdrelay.cli.main", "gateway", "--config", str(config)]
        return processes.supervise(own, count)
    uvloop.run(serve(deployment))
    return 0
