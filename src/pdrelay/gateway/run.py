"""Puts a gateway process together and serves until it is told to stop."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, Gauge

from pdrelay.cluster.certs import expiry_of
from pdrelay.cluster.config import GATEWAY, Deployment
from pdrelay.cluster.tls import client_context
from pdrelay.cluster.topology import Host, Instance
from pdrelay.cluster.units import parse_address
from pdrelay.depot.base import DepotControl
from pdrelay.depot.control_client import connect_control
from pdrelay.engine.base import Engine
from pdrelay.engine.client import WebSocketEngine
from pdrelay.engine.serving import connect_serving
from pdrelay.errors import ConfigError
from pdrelay.gateway.app import build_app
from pdrelay.gateway.base import ServingConnector
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.gateway.metrics import Metrics
from pdrelay.gateway.serve import server_config
from pdrelay.gateway.text import load_text


@asynccontextmanager
async def coordinator(deployment: Deployment, registry: CollectorRegistry | None = None) -> AsyncIterator[Coordinator]:
    """A coordinator connected to every engine and depot of `deployment`, its metrics in `registry`."""
    tls = client_context(deployment.tls.directory, GATEWAY)
    engines: dict[str, Engine] = {
        instance.name: WebSocketEngine(instance.name, _engine_address(instance), tls, server_name=instance.name)
        for instance in deployment.instance
    }
    depots: dict[str, DepotControl] = {
        host.name: connect_control(_depot_address(host), tls, host.name) for host in deployment.host
    }
    connectors: dict[str, ServingConnector] = {
        instance.name: partial(connect_serving, instance.name, _engine_address(instance), tls)
        for instance in deployment.instance
    }
    running = Coordinator(deployment, engines, depots, connectors, registry)
    try:
        yield running
    finally:
        await running.aclose()


async def serve(deployment: Deployment) -> None:
    """Runs the gateway until SIGTERM or SIGINT."""
    host, port = parse_address(deployment.gateway.listen)
    text = load_text(Path(deployment.model.path), deployment.model.chat_template)
    metrics = Metrics()
    _watch_certificate(deployment, metrics.registry)
    async with coordinator(deployment, metrics.registry) as running:
        app = build_app(
            running,
            text,
            deployment.model.name,
            debug=deployment.gateway.debug,
            metrics=metrics,
            adapters=[adapter.name for adapter in deployment.adapter],
        )
        await uvicorn.Server(server_config(app, host, port)).serve()


def _watch_certificate(deployment: Deployment, registry: CollectorRegistry) -> None:
    """Shows when the gateway's certificate ends."""
    path = Path(deployment.tls.directory) / f"{GATEWAY}.pem"

    def seconds() -> float:
        try:
            return expiry_of(path).seconds()
        except ConfigError:  # half-way through being replaced
            return math.nan

    text = "Until the gateway's certificate ends; negative afterwards"
    Gauge("pdrelay_gateway_certificate_expiry_seconds", text, registry=registry).set_function(seconds)


def _engine_address(instance: Instance) -> str:
    return instance.address or instance.listen


def _depot_address(host: Host) -> str:
    return host.address or host.listen
