"""The depot's TLS address: gateways, and depots that send to this one."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from pdrelay.cluster.units import parse_address
from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.bulk import BulkReceiver
from pdrelay.depot.connection import FrameProtocol, Handler
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.link_session import LinkSession
from pdrelay.depot.sessions import open_session
from pdrelay.depot.sockets import BULK, CONNECT_SECONDS, CONTROL, require_name, tune
from pdrelay.errors import StartError

logger = logging.getLogger(__name__)

ACCEPT_PAUSE = 0.1  # seconds after a failure


class TlsListener:
    """Accepts connections and hands each to the event loop or to a thread, as its first byte says."""

    def __init__(self, hub: Hub, address: str, tls: ssl.SSLContext) -> None:
        self._hub, self._tls = hub, tls
        # Clients of bulk connections never read: a session ticket would break the connection at its end.
        tls.num_tickets = 0
        self._loop = asyncio.get_running_loop()
        self._connections: set[FrameProtocol] = set()
        self._sessions: dict[str, LinkSession] = {}
        self._receivers: dict[BulkReceiver, LinkSession | None] = {}
        self._admissions: set[asyncio.Task[None]] = set()
        self._sock = _listen(address)
        self._task = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """The TCP port, also when the address asked for any."""
        port: int = self._sock.getsockname()[1]
        return port

    async def aclose(self) -> None:
        """Closes all connections and waits for their threads."""
        for task in (self._task, *self._admissions):
            task.cancel()
        await asyncio.gather(self._task, *self._admissions, return_exceptions=True)
        self._sock.close()
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*(connection.closed.wait() for connection in list(self._connections)))
        for receiver in list(self._receivers):
            receiver.stop()
            await asyncio.to_thread(receiver.thread.join, CONNECT_SECONDS)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:  # be it that no more files may be opened just now
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            task = asyncio.create_task(self._admit(sock))
            self._admissions.add(task)
            task.add_done_callback(self._admissions.discard)

    async def _admit(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                tune(sock)
                purpose = await self._loop.sock_recv(sock, 1)
            if purpose == BULK:
                self._start_bulk(sock)
                return
            if purpose == CONTROL:
                await self._loop.connect_accepted_socket(
                    lambda: FrameProtocol(self._open, self._connections), sock,
                    ssl=self._tls, ssl_handshake_timeout=CONNECT_SECONDS,
                )  # fmt: skip
                return
        except (OSError, TimeoutError) as error:
            logger.warning("connection refused: %s", error)
        except asyncio.CancelledError:
            sock.close()
            raise
        sock.close()

    def _open(self, body: bytes, connection: FrameProtocol) -> Handler:
        hello = link.decode_first(body)
        if isinstance(hello, link.LinkHello):
            require_name(hello.depot, connection.certificate)
            return LinkSession(self._hub, hello, connection.write, self._sessions)
        session = open_session(self._hub, hello, arena_fd=None)
        connection.write(wire.frame(wire.Welcome(self._hub.name, self._hub.fleet_key, self._hub.epoch)))
        return session

    # Bulk

    def _start_bulk(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        receiver = BulkReceiver(
            sock, self._tls, self._hub.inbox, self._loop.call_soon_threadsafe,
            self._on_admitted, self._on_batch, self._on_end,
        )  # fmt: skip
        self._receivers[receiver] = None

    def _on_admitted(self, receiver: BulkReceiver, depot: str) -> None:
        session = self._sessions.get(depot)
        if session is None:  # its control connection is gone already
            receiver.stop()
            return
        session.adopt(receiver)
        self._receivers[receiver] = session

    def _on_batch(self, receiver: BulkReceiver, number: int | None, landed: list[Landed]) -> None:
        session = self._receivers.get(receiver)
        if session is not None:
            session.on_batch(number, landed)
        else:
            self._hub.receivers.landed(landed)
            self._hub.settle()

    def _on_end(self, receiver: BulkReceiver) -> None:
        session = self._receivers.pop(receiver, None)
        if session is not None:
            session.drop(receiver)


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock
