"""What `pdrelay profile` does and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from rich.console import Console

from pdrelay.bench.profile_deployment import connected, measure_instance, measure_lines
from pdrelay.bench.profile_file import Fitted, fit, text
from pdrelay.bench.profile_lines import LineSample
from pdrelay.bench.profiling import Measured
from pdrelay.cluster.config import load
from pdrelay.errors import ConfigError
from pdrelay.ui.page import write


class Options(NamedTuple):
    """The command's options."""

    instance: str
    output: Path | None
    repetitions: int
    longest: int
    kv_capacity: str
    prefill_chunk: int
    lines: bool
    as_json: bool


async def profile(config: Path, options: Options) -> None:
    """Measures and prints. Raises ConfigError, BenchError."""
    deployment = load(config)
    deployment.instance_named(options.instance)
    console = Console(stderr=True)
    wanted = [instance.name for instance in deployment.instance] if options.lines else [options.instance]
    async with connected(deployment, wanted, depots=options.lines) as parts:
        with console.status("connecting", spinner="line") as status:
            measured = await measure_instance(
                parts, options.instance, options.longest, options.repetitions,
                lambda step: status.update(f"measuring {step}"),
            )  # fmt: skip
            status.update("measuring lines")
            lines = await measure_lines(parts, options.longest, options.repetitions) if options.lines else {}
    _report(measured, fit(measured), list(lines.values()), options)


def _report(measured: Measured, fitted: Fitted, lines: list[LineSample], options: Options) -> None:
    capacity = options.kv_capacity
    if not capacity:
        if not measured.kv_tokens:
            raise ConfigError("profile: the engine's load reports tell no use of KV memory; give --kv-capacity")
        capacity = f"{int(measured.kv_tokens * measured.hello.contract.bytes_per_token)}B"
    file = text(measured, fitted, capacity, options.prefill_chunk)
    if options.output is not None:
        write(options.output, file)
    if options.as_json:
        click.echo(json.dumps(_json(measured, fitted, lines), indent=2))
        return
    if options.output is None:
        click.echo(file)
    for line in lines:
        rate, most = sorted(line.rates)[len(line.rates) // 2], max(line.rates)
        click.echo(
            f"line {line.source} to {line.target}: {rate * 8e-6:.4g} Mbit/s (most {most * 8e-6:.4g}) in "
            f"{len(line.rates)} transfers, depots measure {line.measured_rate * 8e-6:.4g} Mbit/s, "
            f"rtt {line.rtt * 1e3:.3g} ms"
        )


def _json(measured: Measured, fitted: Fitted, lines: list[LineSample]) -> dict[str, object]:
    names = ("prefill", "extend", "decode")
    points = {name: [sample._asdict() for sample in getattr(measured, name)] for name in names}
    costs = {name: msgspec.to_builtins(getattr(fitted, name)) for name in names}
    return {"samples": points, "costs": costs, "errors": fitted.errors, "kv_tokens": measured.kv_tokens,
            "round_trip": measured.round_trip,
            "lines": [line._asdict() for line in lines]}  # fmt: skip
