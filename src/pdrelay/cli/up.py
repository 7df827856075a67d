"""`pdrelay up`: a whole deployment on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_DEFAULT_PORT = 8000


@click.command("up")
@click.option(
    "--emulated", is_flag=True, help="Emulated engines instead of vLLM: starts in seconds, answers at random."
)
@click.option("--debug", is_flag=True, help="Honour the debug controls of requests.")
@click.option("--wan-rate", metavar="RATE", default="20mbit", show_default=True,
              help="Rate of the line between the datacenters, each direction; 0 or unlimited: no limit.")  # fmt: skip
@click.option("--wan-rtt", metavar="TIME", default="30ms", show_default=True, help="Round-trip time of that line.")
@click.option("--wan-codec", type=click.Choice(["none", "zstd", "fp8", "int8"]), default="none", show_default=True,
              help="How KV is encoded on that line; needs the extra `codec`. fp8 and int8 change output.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), default=_DEFAULT_PORT, show_default=True,
              help="Port of the gateway on 127.0.0.1.")  # fmt: skip
@click.option("--policy", type=click.Choice(["pdd", "cdc_pd", "idc_pd"]), default="pdd", show_default=True,
              help="pdd: with relay. cdc_pd: decode waits for the line. idc_pd: decode beside prefill.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
              help="Number format of weights and KV cache.")  # fmt: skip
@click.option("--step-time", metavar="TIME", default="0s", show_default=True,
              help="vLLM's engines take at least this long for a step, and leave the cores to others meanwhile: for "
                   "measurements on a machine that all engines share.")  # fmt: skip
@click.option("--config", "config_path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Start the parts of this deployment file instead; the options above then do not apply.")  # fmt: skip
@click.option("--run-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Where logs, certificates and state go. Default: $XDG_STATE_HOME/pdrelay.")  # fmt: skip
@click.option("--detach/--foreground", default=True, show_default=True,
              help="Return when all is ready and leave it serving, or stay until Ctrl-C and then stop it.")  # fmt: skip
@click.option("--restart", is_flag=True, help="Stop the deployment that runs in the same directory first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end and no progress.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Start a whole deployment on this machine and leave it serving.

    Two datacenters with a shaped line between them: prefill p-0, relay decode rld-0 and the gateway in one, main
    decode md-0 in the other, a depot in each. Serves SmolLM2-135M on vLLM's CPU engine, or emulated engines.
    """
    from pdrelay.cli.local.layout import Settings
    from pdrelay.cli.local.rundir import RunDirectory
    from pdrelay.cli.local.starting import Starter

    config_path, run_dir = options.pop("config_path"), options.pop("run_dir")
    detach, restart, as_json = options.pop("detach"), options.pop("restart"), options.pop("as_json")
    given = [name for name in options if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE]
    if config_path is not None and given:
        option = "--" + given[0].replace("_", "-")
        raise click.UsageError(f"{option} does not apply with --config: change {config_path}", ctx)
    run = RunDirectory(run_dir) if run_dir is not None else RunDirectory.default()
    wanted = config_path.absolute() if config_path is not None else Settings(**options)
    ctx.exit(Starter(run, wanted, detach=detach, as_json=as_json).up(restart))
