"""`pdrelay bench transfer`: the link between two depots, measured."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("transfer")
@click.option("--connections", type=click.IntRange(1, 256), default=4, show_default=True,
              help="TCP connections of every contestant.")  # fmt: skip
@click.option("--size", default="512MiB", show_default=True, metavar="SIZE", help="Payload of one measurement.")
@click.option("--part", default="64KiB", show_default=True, metavar="SIZE",
              help="Bytes of a page's part: one layer's keys and values.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 1024), default=32, show_default=True, help="Parts of a page.")
@click.option("--rounds", type=click.IntRange(5, 1000), default=7, show_default=True,
              help="Rounds in which every contestant has a turn; medians are over these.")  # fmt: skip
@click.option("--peers", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Directory of the peers' scripts. Default: benchmarks/peers here or in the checkout.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small sizes: shows that everything runs, says little about speed.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(
    context: click.Context, connections: int, size: str, part: str, layers: int, rounds: int, peers: Path | None,
    quick: bool, as_json: bool,
) -> int:  # fmt: skip
    """Move KV between two depots of this machine, beside other tools in the same run.

    Exit code 1 when a part failed; what the others measured is printed all the same.
    """
    from pdrelay.bench import report as text
    from pdrelay.bench import transfer
    from pdrelay.cli.bench.running import given, measure

    shape = transfer.Shape(_size("--part", part), layers, _size("--size", size))
    if quick:
        shape, rounds = shape._replace(size=min(shape.size, 32 << 20)), 5
    settings = transfer.Settings(
        connections=connections, rounds=rounds, shape=shape, peers=peers or transfer.default_peers()
    )
    report = transfer.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}".rstrip())
    return measure(report, lambda progress: transfer.run(settings, report, progress), text.show, as_json)


def _size(option: str, text: str) -> int:
    from pdrelay.cluster.units import parse_size
    from pdrelay.errors import ConfigError

    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if size < 1024:
        raise ConfigError(f"{option}: found {text!r}, expected at least 1KiB")
    return size
