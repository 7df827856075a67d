"""Connections to a running deployment's engines and depots, for measuring them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from pdrelay.bench.profile_lines import LineSample, ends, measure_line
from pdrelay.bench.profiling import Measured, Plan, measure
from pdrelay.cluster.config import GATEWAY, Deployment
from pdrelay.cluster.tls import client_context
from pdrelay.depot.base import DepotControl
from pdrelay.depot.control_client import connect_control
from pdrelay.engine.client import WebSocketEngine
from pdrelay.errors import ConfigError, DepotUnavailableError

CONNECT = 10.0
"""Seconds in which engines and depots must answer."""

LINE_SECONDS = 3.0
"""A line is measured with transfers of about so long at its configured rate, or shorter ones."""

PROMPTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Lengths at which prefill is measured, as far as they are wanted."""


class Parts(NamedTuple):
    """Connections, by name."""

    deployment: Deployment
    engines: Mapping[str, WebSocketEngine]
    depots: Mapping[str, DepotControl]


@asynccontextmanager
async def connected(deployment: Deployment, instances: Sequence[str], *, depots: bool) -> AsyncIterator[Parts]:
    """Connects to these instances, and to all depots if they are wanted. Raises ConfigError."""
    tls = client_context(deployment.tls.directory, GATEWAY)
    wanted = [deployment.instance_named(name) for name in instances]
    engines = {i.name: WebSocketEngine(i.name, i.address or i.listen, tls, server_name=i.name) for i in wanted}
    controls = {h.name: connect_control(h.address or h.listen, tls, h.name) for h in deployment.host if depots}
    try:
        yield Parts(deployment, engines, controls)
    finally:
        for engine in engines.values():
            await engine.aclose()
        for control in controls.values():
            await control.aclose()


async def measure_instance(
    parts: Parts, name: str, longest: int, repetitions: int, on_step: Callable[[str], None]
) -> Measured:
    """Measures one instance with prompts up to `longest` tokens. Raises ConfigError, BenchError."""
    await _answers(parts.engines[name])
    prompts = tuple(length for length in PROMPTS if length <= longest)
    return await measure(parts.engines[name], Plan(prompts=prompts, repetitions=repetitions), on_step)


async def measure_lines(parts: Parts, tokens: int, repetitions: int) -> dict[tuple[str, str], LineSample]:
    """Measures each link, by (source, target) cluster, with the KV of prompts of up to `tokens` tokens.

    Links at whose ends nothing is ever prefilled or decoded are left out. Raises ConfigError, BenchError.
    """
    deployment = parts.deployment
    hosts = {host.name: host.cluster for host in deployment.host}
    instances = {i.name: (i.host, [role.value for role in i.roles]) for i in deployment.instance}
    found: dict[tuple[str, str], LineSample] = {}
    for link in deployment.link:
        source = [name for name, cluster in hosts.items() if cluster == link.source]
        target = [name for name, cluster in hosts.items() if cluster == link.target]
        pair = ends(instances, parts.engines, parts.depots, source, target)
        if pair is None:
            continue
        for end in pair:
            await _answers(parts.engines[end.engine.instance])
        try:
            size = link.first_rate * LINE_SECONDS
            found[link.source, link.target] = await measure_line(*pair, tokens, repetitions, size)
        except DepotUnavailableError as error:
            raise ConfigError(f"profile: a depot of the line {link.source} to {link.target}: {error}") from error
    return found


async def _answers(engine: WebSocketEngine) -> None:
    deadline = asyncio.get_running_loop().time() + CONNECT
    while engine.status.hello is None:
        if asyncio.get_running_loop().time() > deadline:
            raise ConfigError(f"profile: engine {engine.instance} does not answer: {engine.status.detail}")
        await asyncio.sleep(0.05)
