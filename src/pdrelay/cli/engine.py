"""`pdrelay engine`: run one engine instance of a deployment, or print its command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from pdrelay.cluster.config import load
from pdrelay.engine.vllm import launch
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
@click.option("--emulated", is_flag=True, help="Run the emulated engine, whichever the file names.")
@click.option("--print", "print_only", is_flag=True, help="Print the command line and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the command line as JSON: argv and environment.")
def command(config_path: Path, name: str, emulated: bool, print_only: bool, as_json: bool) -> None:
    """Run the engine instance NAME of a deployment. A vLLM instance replaces this process.

    An emulated instance without a profile in the file takes `tiny-emulated`.
    """
    deployment = load(config_path)
    emulated = emulated or deployment.instance_named(name).engine == "emulated"
    started = _emulated_command(config_path, name) if emulated else launch.command(deployment, name)
    if as_json:
        click.echo(json.dumps({"argv": started.argv, "env": started.env}))
    elif print_only:
        click.echo(str(started))
    if print_only:
        return
    if emulated:
        from pdrelay.engine.emulated.process import run

        run(deployment, name)
        return
    launch.check_adapters(deployment)
    try:
        os.execvpe(started.argv[0], started.argv, {**os.environ, **started.env})  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise StartError(f"engine {name}: {started.argv[0]}: {error.strerror}") from error


def _emulated_command(config_path: Path, name: str) -> launch.Command:
    return launch.Command(["pdrelay", "engine", "--emulated", "--config", str(config_path), "--name", name], {})
