"""What `pdrelay profile` does and prints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from rich.console import Console

from pdrelay.bench.profile_file import Fitted, fit, text
from pdrelay.bench.profile_lines import LineSample, ends, measure_line
from pdrelay.bench.profiling import Measured, Plan, measure
from pdrelay.cluster.config import GATEWAY, Deployment, load
from pdrelay.cluster.tls import client_context
from pdrelay.depot.base import DepotControl
from pdrelay.depot.control_client import connect_control
from pdrelay.engine.client import WebSocketEngine
from pdrelay.errors import ConfigError, DepotUnavailableError
from pdrelay.ui.page import write

CONNECT = 10.0
"""Seconds in which engines and depots must answer."""


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
    tls = client_context(deployment.tls.directory, GATEWAY)
    wanted = deployment.instance if options.lines else [deployment.instance_named(options.instance)]
    engines = {i.name: WebSocketEngine(i.name, i.address or i.listen, tls, server_name=i.name) for i in wanted}
    depots = {h.name: connect_control(h.address or h.listen, tls, h.name) for h in deployment.host if options.lines}
    try:
        with console.status("connecting", spinner="line") as status:
            await _connected(engines[options.instance])
            prompts = tuple(n for n in (128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768) if n <= options.longest)
            plan = Plan(prompts=prompts, repetitions=options.repetitions)
            measured = await measure(engines[options.instance], plan, lambda step: status.update(f"measuring {step}"))
            samples = await _lines(deployment, engines, depots, options) if options.lines else []
    finally:
        for engine in engines.values():
            await engine.aclose()
        for depot in depots.values():
            await depot.aclose()
    _report(measured, fit(measured), samples, options)


async def _connected(engine: WebSocketEngine) -> None:
    deadline = asyncio.get_running_loop().time() + CONNECT
    while engine.status.hello is None:
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigError(f"profile: engine {engine.instance} does not answer: {engine.status.detail}")
        await asyncio.sleep(0.05)


async def _lines(
    deployment: Deployment, engines: dict[str, WebSocketEngine], depots: Mapping[str, DepotControl], options: Options
) -> list[LineSample]:
    hosts = {host.name: host.cluster for host in deployment.host}
    instances = {i.name: (i.host, [role.value for role in i.roles]) for i in deployment.instance}
    found: list[LineSample] = []
    for link in deployment.link:
        source = [name for name, cluster in hosts.items() if cluster == link.source]
        target = [name for name, cluster in hosts.items() if cluster == link.target]
        pair = ends(instances, engines, depots, source, target)
        if pair is None:
            continue  # nothing is ever prefilled at that end
        for end in pair:
            await _connected(engines[end.engine.instance])
        try:
            found.append(await measure_line(*pair, options.longest, options.repetitions))
        except DepotUnavailableError as error:
            raise ConfigError(f"profile: a depot of the line {link.source} to {link.target}: {error}") from error
    return found


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
            "lines": [line._asdict() for line in lines]}  # fmt: skip
