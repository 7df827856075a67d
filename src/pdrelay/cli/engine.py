"""`pdrelay engine`: run one engine instance of a deployment, or print its command line."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pdrelay.cluster.config import load
from pdrelay.errors import StartError


@click.command("engine", short_help="Run one engine instance, or print its command line.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Deployment file, pdrelay.toml.",
)
@click.option("--name", required=True, help="Instance to run.")
@click.option("--print", "print_only", is_flag=True, help="Print the command line and end.")
def command(config_path: Path, name: str, print_only: bool) -> None:
    """Runs the engine instance NAME of a deployment. A vLLM instance replaces this process."""
    deployment = load(config_path)
    instance = deployment.instance_named(name)
    if instance.engine == "emulated":
        _emulated(config_path, name, print_only)
        return
    from pdrelay.engine.vllm import launch

    started = launch.command(deployment, name)
    if print_only:
        click.echo(str(started))
        return
    try:
        os.execvpe(started.argv[0], started.argv, {**os.environ, **started.env})  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise StartError(f"engine {name}: {started.argv[0]}: {error.strerror}") from error


def _emulated(config_path: Path, name: str, print_only: bool) -> None:
    if print_only:
        click.echo(f"pdrelay engine --config {config_path} --name {name}")
        return
    from pdrelay.engine.emulated.process import run

    run(load(config_path), name)
