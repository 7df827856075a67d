"""A throw-away fleet authority, and engines that serve sessions over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import uvicorn
from starlette.applications import Starlette
from websockets.exceptions import InvalidState
from websockets.protocol import State

from pdrelay.cluster import certs
from pdrelay.cluster.tls import server_context
from pdrelay.engine.base import EngineBackend
from pdrelay.engine.server import SessionServer


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `pdrelay certs` makes it, for `gateway` and `engine`."""
    directory = tmp_path_factory.mktemp("tls")
    certs.ensure(directory, ["gateway", "engine"])
    return directory


class Served(NamedTuple):
    """A backend on a real socket."""

    address: str
    server: uvicorn.Server
    task: asyncio.Task[None]

    def drop_connections(self) -> None:
        """Cuts every connection, as a crash of the process does."""
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


Serve = Callable[..., "contextlib.AbstractAsyncContextManager[Served]"]


@pytest.fixture
def serve(tls: Path) -> Serve:
    """Serves a backend with mutual TLS; `port` chooses the port, `secure=False` plain TCP."""

    @contextlib.asynccontextmanager
    async def serve(
        backend: EngineBackend, *, port: int = 0, secure: bool = True, **options: float
    ) -> AsyncIterator[Served]:
        app = Starlette(routes=[SessionServer(backend, **options).route()])
        listener = socket.create_server(("127.0.0.1", port))
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        config.ssl = server_context(tls, "engine") if secure else None
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield Served(f"127.0.0.1:{listener.getsockname()[1]}", server, task)
        finally:
            server.should_exit = True
            try:
                await task
            except InvalidState:  # uvicorn's, where a WebSocket is just being closed
                await eventually(lambda: not _closing(server))
                await server.shutdown()
            listener.close()

    return serve


def _closing(server: uvicorn.Server) -> bool:
    """Whether a WebSocket is about to close."""
    connections = [getattr(connection, "conn", None) for connection in server.server_state.connections]
    return any(getattr(connection, "state", None) is State.CLOSING for connection in connections)


async def eventually(condition: Callable[[], object], timeout: float = 10) -> None:
    """Returns once `condition` holds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - any condition, not only ours
            await asyncio.sleep(0.005)


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., object]:
    return eventually
