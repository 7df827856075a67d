"""The depot's TLS address: gateways, and depots that send to this one."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from pdrelay.cluster.units import parse_address
from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.admission import BulkHandshake
from pdrelay.depot.bulk_receiver import BulkReceiver, Callbacks
from pdrelay.depot.channel import TlsReader
from pdrelay.depot.connection import FrameProtocol, Handler
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.link_session import LinkSession, Peers
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.nixl.base import MakeAgent
from pdrelay.depot.sessions import open_session
from pdrelay.depot.sockets import BULK, CONNECT_SECONDS, CONTROL, require_name, tune
from pdrelay.errors import ProtocolError, StartError

logger = logging.getLogger(__name__)

CHECKERS = 4
"""Threads that verify what depots wrote by NIXL."""

ACCEPT_PAUSE = 0.1  # seconds after a failure


class TlsListener:
    """Accepts connections and hands each to the event loop or to a thread, as its first byte says."""

    def __init__(
        self, hub: Hub, address: str, tls: ssl.SSLContext, agents: Mapping[str, MakeAgent] | None = None
    ) -> None:
        """`agents` has those depots that write by NIXL. Raises StartError."""
        self._hub, self._tls = hub, tls
        # Clients of bulk connections never read: a session ticket would break the connection at its end.
        tls.num_tickets = 0
        self._loop = asyncio.get_running_loop()
        self._connections: set[FrameProtocol] = set()
        self._checkers = ThreadPoolExecutor(CHECKERS, "nixl check")
        self._peers = Peers(agents or {}, self._checkers)
        self._receivers: dict[BulkReceiver, LinkSession] = {}
        post = Mailbox(self._settle).post
        self._callbacks = Callbacks(post, self._on_batch, self._on_end)
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
        for landing in self._peers.landings.values():
            await landing.aclose()
        self._checkers.shutdown()

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
                    await self._admit_bulk(sock)
                    return
            if purpose == CONTROL:
                await self._loop.connect_accepted_socket(
                    lambda: FrameProtocol(self._open, self._connections), sock,
                    ssl=self._tls, ssl_handshake_timeout=CONNECT_SECONDS,
                )  # fmt: skip
                return
        except (OSError, TimeoutError, ProtocolError) as error:
            logger.warning("connection refused: %s", error)
        except asyncio.CancelledError:
            sock.close()
            raise
        sock.close()

    def _open(self, body: bytes, connection: FrameProtocol) -> Handler:
        hello = link.decode_first(body)
        if isinstance(hello, link.LinkHello):
            require_name(hello.depot, connection.certificate)
            return LinkSession(self._hub, hello, connection.write, self._peers, connection.finish)
        session = open_session(self._hub, hello, arena_fd=None)
        connection.write(wire.frame(wire.Welcome(wire.VERSIONS, self._hub.name, self._hub.fleet_key, self._hub.epoch)))
        return session

    # Bulk

    async def _admit_bulk(self, sock: socket.socket) -> None:
        """Raises OSError, ProtocolError."""
        handshake = BulkHandshake(sock, self._tls)
        await handshake.complete()
        hello = link.decode_bulk_hello(await handshake.read_frame())
        require_name(hello.depot, handshake.tls.getpeercert())
        session = self._peers.sessions.get(hello.depot)
        if session is None or session.direct:
            raise ProtocolError(f"depot {hello.depot} has no control connection for bulk connections")
        sock.setblocking(True)
        reader = TlsReader(sock, handshake.tls, handshake.incoming)
        receiver = BulkReceiver(reader, hello.depot, self._hub.inbox, self._callbacks)
        self._receivers[receiver] = session
        session.adopt(receiver)

    def _on_batch(self, receiver: BulkReceiver, number: int | None, landed: list[Landed]) -> None:
        self._receivers[receiver].on_batch(number, landed)

    def _on_end(self, receiver: BulkReceiver) -> None:
        self._receivers.pop(receiver).drop(receiver)

    def _settle(self) -> None:
        for session in list(self._peers.sessions.values()):
            session.send_acks()
        self._hub.settle()


def _listen(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock
