"""`pdrelay bench handoff`: the switch from relay to main decode, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command("handoff")
@click.option("--handoffs", type=click.IntRange(1, 10_000), default=24, show_default=True,
              help="Handoffs of each mode.")  # fmt: skip
@click.option("--at-once", type=click.IntRange(1, 64), default=4, show_default=True, help="Streams at a time.")
@click.option("--output-tokens", type=click.IntRange(32, 4096), default=128, show_default=True,
              help="Length of the streams that are handed over.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(2, 1000), default=7, show_default=True,
              help="Repetitions of each way to bring tokens over.")  # fmt: skip
@click.option("--part", "parts", type=click.Choice(["incremental", "seams"]), multiple=True,
              help="Only this part. Default: both.")  # fmt: skip
@click.option("--mode", "modes", type=click.Choice(["one_shot", "catch_up"]), multiple=True,
              help="Only the seams of this mode. Default: both.")  # fmt: skip
@click.option("--wan-rate", "rate", metavar="RATE", default="20mbit", show_default=True, help="Rate of the line.")
@click.option("--wan-rtt", "rtt", metavar="TIME", default="30ms", show_default=True, help="Its round-trip time.")
@click.option("--step-time", metavar="TIME", default="0s", show_default=True,
              help="vLLM's engines take at least this long for a step: shared cores then make no pauses.")  # fmt: skip
@click.option("--emulated", is_flag=True, help="Emulated engines instead of vLLM.")
@click.option("--quick", is_flag=True, help="Few repetitions: shows that everything runs.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw the output rate across the seam (.png, .svg).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(context: click.Context, /, quick: bool, plot_path: Path | None, as_json: bool, **options: Any) -> int:
    """Start a deployment on this machine and measure its handoffs.

    incremental: main decode computes the relay's tokens from their ids, beside having their KV sent over the line.
    seams: the reader's pauses around the switch and elsewhere, for One-Shot and Catch-Up.
    """
    from pdrelay.bench import handoff, handoff_report
    from pdrelay.cli.bench.options import parsed
    from pdrelay.cli.bench.running import given, measure
    from pdrelay.cluster.units import parse_time

    options["step_time"] = parsed("--step-time", options["step_time"], parse_time)
    settings = handoff.Settings(**{name: value for name, value in options.items() if value != ()})
    if settings.emulated:
        settings = settings._replace(prompt_tokens=handoff.EMULATED_PROMPTS)
    if quick:
        settings = settings._replace(handoffs=min(settings.handoffs, 4), rounds=2, sizes=(10, 100), output_tokens=96)
    report = handoff.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}", settings)
    code = measure(report, lambda progress: handoff.run(settings, report, progress), handoff_report.show, as_json)
    if plot_path is not None and report.seams:
        handoff_report.plot(report, plot_path)
    return code
