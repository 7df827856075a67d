"""`pdrelay bench transfer`: the link between two depots, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdrelay.bench.settings import Carrier, Settings


@click.command("transfer")
@click.option("--only", "parts", multiple=True, type=click.Choice(["throughput", "shaped", "table2"]),
              help="Measure this part alone; repeatable. Default: all.")  # fmt: skip
@click.option("--connections", type=click.IntRange(1, 256), default=4, show_default=True,
              help="TCP connections of every contestant.")  # fmt: skip
@click.option("--size", default="512MiB", show_default=True, metavar="SIZE",
              help="throughput: payload of one measurement.")  # fmt: skip
@click.option("--part", default="64KiB", show_default=True, metavar="SIZE",
              help="Bytes of a page's part: one layer's keys and values.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 1024), default=32, show_default=True, help="Parts of a page.")
@click.option("--rounds", type=click.IntRange(5, 1000), default=7, show_default=True,
              help="Rounds in which every contestant has a turn; medians are over these.")  # fmt: skip
@click.option("--peers", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Directory of the peers' scripts. Default: benchmarks/peers here or in the checkout.")  # fmt: skip
@click.option("--line", type=click.Choice(["namespaces", "user"]),
              help="Where the shaped line runs: between two network namespaces (root, iproute2), or in user space. "
              "Default: namespaces if they can be had.")  # fmt: skip
@click.option("--line-rate", default="1gbit", show_default=True, metavar="RATE", help="shaped: rate of the line.")
@click.option("--line-rtt", default="0ms", show_default=True, metavar="TIME", help="shaped: round-trip time added.")
@click.option("--carrier", "carriers", multiple=True, type=click.Choice(["link-fair", "link-srpt", "pool"]),
              help="table2: run these rows alone; repeatable. Default: all.")  # fmt: skip
@click.option("--scale", type=click.FloatRange(1), default=100.0, show_default=True,
              help="table2: published rates and sizes over those used here.")  # fmt: skip
@click.option("--slower", type=click.FloatRange(1), default=1.0, show_default=True,
              help="table2: pass so many times as slowly and divide all times by it: for few cores.")  # fmt: skip
@click.option("--duration", type=click.FloatRange(1), default=30.0, show_default=True,
              help="table2: seconds of arrivals for each of six rows, times `--slower`.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="table2: of arrivals and sizes.")
@click.option("--soak", type=click.IntRange(100), metavar="N",
              help="Instead: N transfers, and whether the depots' memory stays flat.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="table2: draw the latencies (.pdf, .png, .svg).")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small sizes: shows that everything runs, says little about speed.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(context: click.Context, /, plot_path: Path | None, as_json: bool, **options: Any) -> int:
    """Move KV between two depots of this machine, beside other tools in the same run.

    throughput: one line without a limit, beside a bare socket loop, iperf3, NIXL and Mooncake.
    shaped: how much of a line of a set rate the link fills, beside iperf3.
    table2: PDD's experiment, deltas of skewed and even sizes on a full line, beside the published rows.

    Exit code 1 when a part failed; what the others measured is printed all the same.
    """
    from pdrelay.bench import plots, table2_plot, transfer
    from pdrelay.bench import report as text
    from pdrelay.cli.bench.running import given, measure

    settings = _settings(**options)
    if plot_path is not None:
        plots.require(plot_path)
    report = transfer.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")
    code = measure(report, lambda progress: transfer.run(settings, report, progress), text.show, as_json)
    if plot_path is not None and report.table2 is not None:
        table2_plot.plot(report.table2, plot_path)
    return code


def _settings(
    parts: tuple[str, ...], size: str, part: str, layers: int, peers: Path | None, carriers: tuple[Carrier, ...],
    quick: bool, soak: int | None, **further: Any,

) -> Settings:  # fmt: skip
    """Checks what click cannot. Raises ConfigError."""
    from pdrelay.bench.settings import CARRIERS, PARTS, Settings, Shape
    from pdrelay.cli.bench.options import parsed
    from pdrelay.cli.bench.running import default_peers
    from pdrelay.cluster.units import parse_rate, parse_size, parse_time

    parsed("--line-rate", further["line_rate"], parse_rate, least=1e3)
    parsed("--line-rtt", further["line_rtt"], parse_time)
    shape = Shape(parsed("--part", part, parse_size, least=1 << 10), layers)
    settings = Settings(
        parts=["soak"] if soak else [name for name in PARTS if name in parts or not parts],
        soak=soak or 0,
        shape=shape,
        size=parsed("--size", size, parse_size, least=shape.page_bytes),
        peers=peers or default_peers(),
        carriers=carriers or CARRIERS,
        **further,
    )
    if quick:
        small = min(settings.size, max(32 << 20, shape.page_bytes))
        settings = settings._replace(size=small, rounds=5, line_seconds=0.5, duration=min(settings.duration, 3.0))
    return settings
