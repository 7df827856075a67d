"""The depot's listeners: the Unix socket of its host, with the arena's descriptor for engines."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from pathlib import Path

from pdrelay.depot import wire
from pdrelay.depot.arena import Arena
from pdrelay.depot.connection import Connections, FrameProtocol, Handler
from pdrelay.depot.hub import Hub
from pdrelay.depot.sessions import open_session
from pdrelay.errors import ProtocolError, StartError

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25


class DepotServer:
    """Serves one hub. Start it with `start`, stop it with `aclose`; all in one event loop."""

    def __init__(self, hub: Hub, arena: Arena) -> None:
        self.hub, self.arena = hub, arena
        self.connections = Connections()
        hub.cut_connections.append(self.connections.cut)
        self._unix: asyncio.Server | None = None
        self._socket_path: Path | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, socket_path: str | Path) -> None:
        """Listens on the Unix socket. Raises StartError when another depot does so already."""
        path = Path(socket_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_socket(path)
        loop = asyncio.get_running_loop()
        self._unix = await loop.create_unix_server(
            lambda: FrameProtocol(self._open, self.connections), str(path), backlog=128
        )
        self._socket_path = path
        os.chmod(path, 0o600)  # whoever may connect may read every prompt's KV
        self._ticker = asyncio.create_task(self._tick())

    async def aclose(self) -> None:
        """Closes all connections, removes the socket file and unmaps the arena."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._unix is not None:
            self._unix.close()
        await self.connections.aclose()
        if self._unix is not None:
            await self._unix.wait_closed()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
        self.arena.close()

    def _open(self, body: bytes, connection: FrameProtocol) -> Handler:
        hello = wire.decode_hello(body)
        session = open_session(self.hub, hello, self.arena.fd)
        hub = self.hub
        welcome = wire.frame(wire.Welcome(wire.VERSIONS, hub.name, hub.fleet_key, hub.epoch, self.arena.transparent))
        if hello.kind == "engine":
            try:
                connection.write_with_fd(welcome, self.arena.fd)
            except OSError as error:
                session.close()
                raise ProtocolError("the engine left before its welcome") from error
        else:
            connection.write(welcome)
        return session

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.hub.tick()
            except Exception:  # time-outs must go on
                logger.exception("tick failed")


def remove_stale_socket(path: Path) -> None:
    """Removes a socket file that nobody listens on. Raises StartError when somebody does, or it is another file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise StartError(f"another depot listens on {path}")
