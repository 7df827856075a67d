"""The process of one emulated engine: sessions and a plain OpenAI face over mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.tls import server_context
from pdrelay.cluster.topology import Instance, Role
from pdrelay.cluster.units import parse_address
from pdrelay.depot.base import EngineDepot
from pdrelay.depot.control_client import control_over_unix
from pdrelay.depot.engine_client import connect_engine
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.emulated.openai import OpenAIFace
from pdrelay.engine.server import SessionServer
from pdrelay.errors import DepotUnavailableError, StartError
from pdrelay.perf import profile as profiles

DEFAULT_PROFILE = "tiny-emulated"
"""Of an instance that the deployment file has run on vLLM."""

DEPOT_PATIENCE = 10.0
"""Seconds that the engine's start waits for the depot."""


def run(deployment: Deployment, name: str) -> None:
    """Serves instance `name` until SIGTERM or SIGINT. Raises ConfigError, ContractError, StartError."""
    instance = deployment.instance_named(name)
    asyncio.run(_serve(deployment, instance))


async def _serve(deployment: Deployment, instance: Instance) -> None:
    tls = server_context(deployment.tls.directory, instance.name)
    async with _backend(deployment, instance) as backend:
        with _listen(instance) as listener:
            face = OpenAIFace(backend)
            app = Starlette(routes=[SessionServer(backend).route(), *face.routes()])
            config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=2)
            config.load()
            config.ssl = tls
            _survive_signals()
            await uvicorn.Server(config).serve(sockets=[listener])
            await face.aclose()


@contextlib.asynccontextmanager
async def _backend(deployment: Deployment, instance: Instance) -> AsyncIterator[EmulatedBackend]:
    model, socket_path = deployment.model, deployment.host_named(instance.host).socket
    profile = profiles.load(Path(instance.profile) if instance.profile else profiles.shipped(DEFAULT_PROFILE))
    contract = profile.contract(model.name, model.revision)

    def connect() -> EngineDepot:
        return connect_engine(socket_path, instance.name, contract)

    first = await asyncio.to_thread(_patiently, connect, instance.name)
    control = control_over_unix(socket_path, f"engine {instance.name}")
    backend = EmulatedBackend(
        instance=instance.name,
        model=model.name,
        revision=model.revision,
        max_model_len=model.max_model_len,
        profile=profile,
        depot=HostDepot(first, connect),
        control=control,
        publish_decode=Role.DECODE in instance.roles,
        adapters={adapter.name: adapter.identity for adapter in deployment.adapter},
    )
    try:
        yield backend
    finally:
        await backend.aclose()
        await control.aclose()


def _patiently(connect: Callable[[], EngineDepot], name: str) -> EngineDepot:
    deadline = time.monotonic() + DEPOT_PATIENCE
    while True:
        try:
            return connect()
        except DepotUnavailableError as error:
            if time.monotonic() > deadline:
                raise StartError(f"engine {name} cannot start: {error}") from error
        time.sleep(0.05)


def _listen(instance: Instance) -> socket.socket:
    """A listening socket whose connections send at once: asyncio sees to that only for sockets that it made itself.

    Without, a token waits up to 40 ms until the gateway's kernel has acknowledged the one before.
    """
    host, port = parse_address(instance.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise StartError(f"engine {instance.name} cannot listen on {instance.listen}: {error.strerror}") from error


def _survive_signals() -> None:
    """uvicorn stops at a signal and then raises it again: let that not cut the end short."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: None)
