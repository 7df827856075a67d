"""`pdrelay gateway`: the OpenAI front end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pdrelay.cluster.config import Deployment
    from pdrelay.gateway.text import Text
    from pdrelay.gateway.workers import Worker

_PATH = click.Path(path_type=Path)


@click.command("gateway")
@click.option("--config", "config", type=_PATH, required=True, help="Deployment file, pdrelay.toml.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N",
              help="Processes on the one address. Default: gateway.workers of the file.")  # fmt: skip
@click.option("--worker", type=int, hidden=True, help="Number of this process among several.")
@click.option("--worker-directory", type=_PATH, hidden=True, help="Where they find each other.")
@click.option("--worker-of", type=int, default=0, hidden=True, help="The process that supervises them.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def command(
    config: Path, workers: int | None, worker: int | None, worker_directory: Path | None, worker_of: int, as_json: bool
) -> int:
    """Run the OpenAI-compatible gateway of a deployment until it is interrupted."""
    import json
    import logging
    import sys

    from pdrelay.cluster.config import load
    from pdrelay.gateway import workers as processes

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    deployment = load(config)
    if worker is not None and worker_directory is not None:
        processes.end_with(worker_of)
        _serve(deployment, processes.Worker(worker, worker_directory))
        return 0
    url = f"http://{deployment.gateway.listen}/v1"
    click.echo(json.dumps({"url": url}) if as_json else f"serving {deployment.model.name} on {url}")
    if (count := workers or deployment.gateway.workers) > 1:
        own = [sys.executable, "-m", "pdrelay.cli.main", "gateway", "--config", str(config)]
        return processes.supervise(own, count)
    _serve(deployment, None)
    return 0


def _serve(deployment: Deployment, worker: Worker | None) -> None:
    import uvloop

    text = _load_text(deployment, worker)
    from pdrelay.gateway.run import serve

    uvloop.run(serve(deployment, text, worker))


def _load_text(deployment: Deployment, worker: Worker | None) -> Text:
    """The tokenizer is read by another process while this one imports the front end: either takes a second."""
    from concurrent.futures import ThreadPoolExecutor

    from pdrelay.gateway.tokenizer_data import read_tokenizer

    model = Path(deployment.model.path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_tokenizer, model, worker.directory if worker else None)
        import pdrelay.gateway.run  # noqa: F401  # which takes the second
        from pdrelay.gateway.text import load_text
    return load_text(model, deployment.model.chat_template, reading.result())
