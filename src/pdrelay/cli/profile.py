"""`pdrelay profile`: measure a running instance and the lines."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("profile")
@click.argument("instance", metavar="INSTANCE")
@click.option("--config", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="Deployment file, pdrelay.toml.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write the profile here. Default: print it.")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=2), default=5, show_default=True, metavar="N",
              help="Times that each point is measured.")  # fmt: skip
@click.option("--longest", type=click.IntRange(min=512), default=4096, show_default=True, metavar="TOKENS",
              help="Longest prompt.")  # fmt: skip
@click.option("--kv-capacity", default="", metavar="SIZE", help="KV memory. Default: from the engine's load reports.")
@click.option("--prefill-chunk", type=click.IntRange(min=1), default=2048, show_default=True, metavar="TOKENS",
              help="The engine's max_num_batched_tokens.")  # fmt: skip
@click.option("--lines/--no-lines", default=True, show_default=True, help="Measure the lines between clusters, too.")
@click.option("--json", "as_json", is_flag=True, help="Print every sample as one JSON object.")
def command(
    instance: str,
    config: Path,
    output: Path | None,
    repetitions: int,
    longest: int,
    kv_capacity: str,
    prefill_chunk: int,
    lines: bool,
    as_json: bool,
) -> None:
    """Measure how fast INSTANCE is, and what the lines carry.

    The deployment must run and should be idle. The profile file is for `pdrelay simulate` and emulated engines.
    """
    import asyncio

    from pdrelay.cli.profiling import Options, profile

    options = Options(instance, output, repetitions, longest, kv_capacity, prefill_chunk, lines, as_json)
    asyncio.run(profile(config, options))
