"""Puts a gateway process together and serves until it is told to stop."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
from pdrelay.gateway.text import Text
from pdrelay.gateway.workers import Worker, metrics_of_all, shared_socket

COLLECT_AFTER = 10_000, 20, 20
"""Objects, then collections of the younger generation, after which garbage is collected: a request makes a thousand
objects and no cycle."""


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


async def serve(deployment: Deployment, text: Text, worker: Worker | None = None) -> None:
    """Runs the gateway until SIGTERM or SIGINT; as `worker` beside others on the same address."""
    host, port = parse_address(deployment.gateway.listen)
    _give_memory_back()
    metrics = Metrics()
    _watch_certificate(deployment, metrics.registry)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(coordinator(deployment, metrics.registry))
        exposition, sockets = None, None
        if worker is not None:
            exposition = await stack.enter_async_context(metrics_of_all(worker, metrics.exposition))
            sockets = [stack.enter_context(shared_socket(host, port))]
        app = build_app(
            running,
            text,
            deployment.model.name,
            debug=deployment.gateway.debug,
            metrics=metrics,
            exposition=exposition,
            adapters=[adapter.name for adapter in deployment.adapter],
        )
        await uvicorn.Server(server_config(app, host, port)).serve(sockets)


def _give_memory_back() -> None:
    """Reading a tokenizer takes far more memory than keeping it, which glibc would hold on to."""
    gc.collect()
    gc.freeze()  # what is there now stays: no collection need look at it
    gc.set_threshold(*COLLECT_AFTER)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


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
