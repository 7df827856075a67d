"""The depot's TLS address: gateways, and depots that send to this one."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from pdrelay.cluster.units import parse_address
from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.admission import ADMIT_SECONDS, Admissions, BulkHandshake, read_clear, read_hello
from pdrelay.depot.bulk_receiver import BulkReceiver, Callbacks
from pdrelay.depot.channel import PlainReader, Reader, TlsReader
from pdrelay.depot.connection import Connections, FrameProtocol, Handler
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.link_session import LinkSession, Peers
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.nixl.base import MakeAgent
from pdrelay.depot.sessions import open_session
from pdrelay.depot.sockets import BULK, CLEAR, CONNECT_SECONDS, CONTROL, join_thread, require_name, tune
from pdrelay.errors import ProtocolError, StartError

logger = logging.getLogger(__name__)

CHECKERS = 4
"""Threads that verify what depots wrote by NIXL."""

LOOK_SECONDS = 1.0


class TlsListener:
    """Accepts connections and hands each to the event loop or to a thread, as its first byte says."""

    def __init__(
        self,
        hub: Hub,
        address: str,
        tls: ssl.SSLContext,
        agents: Mapping[str, MakeAgent] | None = None,
        clear: Collection[str] = (),
    ) -> None:
        """`agents` has those depots that write by NIXL, `clear` those that send KV without TLS. Raises StartError."""
        self._hub, self._tls = hub, tls
        self._connections = Connections()
        hub.cut_connections.append(self._connections.cut)
        self._checkers = ThreadPoolExecutor(CHECKERS, "nixl check")
        self._peers = Peers(agents or {}, self._checkers, frozenset(clear))
        self._receivers: dict[BulkReceiver, LinkSession] = {}
        self._callbacks = Callbacks(Mailbox(self._settle).post, self._on_batch, self._on_end)
        self._sock = _listen(address)
        self.admissions = Admissions(self._sock, self._admit)
        self._task = asyncio.create_task(self._look())

    @property
    def port(self) -> int:
        """The TCP port, also when the address asked for any."""
        port: int = self._sock.getsockname()[1]
        return port

    async def aclose(self) -> None:
        """Closes all connections and waits for their threads."""
        await self.admissions.aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._connections.aclose()
        for receiver in list(self._receivers):
            receiver.stop()
            await join_thread(receiver.thread, CONNECT_SECONDS)
        for landing in self._peers.landings.values():
            await landing.aclose()
        self._checkers.shutdown()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self._connections.look()
                for session in list(self._peers.sessions.values()):
                    session.tell_stats()
            except Exception:  # the next look must come
                logger.exception("look at the connections failed")

    async def _admit(self, sock: socket.socket) -> None:
        tune(sock)
        purpose = await asyncio.get_running_loop().sock_recv(sock, 1)
        if purpose == CONTROL:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: FrameProtocol(self._open, self._connections), sock,
                ssl=self._tls, ssl_handshake_timeout=ADMIT_SECONDS,
            )  # fmt: skip
        elif purpose == BULK:
            await self._admit_bulk(sock)
        elif purpose == CLEAR:
            await self._admit_clear(sock)
        else:
            raise ProtocolError("the first byte is none of ours" if purpose else "it left without a word")

    def _open(self, body: bytes, connection: FrameProtocol) -> Handler:
        hello = link.decode_first(body)
        if isinstance(hello, link.LinkHello):
            require_name(hello.depot, connection.certificate)
            return LinkSession(self._hub, hello, connection.write, self._peers, connection.finish)
        session = open_session(self._hub, hello, arena_fd=None)
        welcome = wire.Welcome(wire.VERSIONS, self._hub.name, self._hub.fleet_key, self._hub.epoch)
        connection.write(wire.frame(welcome))
        return session

    # Bulk

    async def _admit_bulk(self, sock: socket.socket) -> None:
        handshake = BulkHandshake(sock, self._tls)
        await handshake.complete()
        hello = link.decode_bulk_hello(await read_hello(handshake.read))
        require_name(hello.depot, handshake.tls.getpeercert())
        session = self._session(hello.depot)
        if not session.takes_tls:
            raise ProtocolError(f"depot {hello.depot} must send otherwise than by TLS")
        sock.setblocking(True)
        self._receive(TlsReader(sock, handshake.tls, handshake.incoming), hello.depot, session)

    async def _admit_clear(self, sock: socket.socket) -> None:
        hello = link.decode_bulk_hello(await read_hello(lambda size: read_clear(sock, size)))
        session = self._session(hello.depot)
        if not session.redeem(hello.secret):
            raise ProtocolError(f"a bulk connection of depot {hello.depot} in clear has no secret of ours")
        sock.setblocking(True)
        self._receive(PlainReader(sock, hello.secret), hello.depot, session)

    def _session(self, depot: str) -> LinkSession:
        session = self._peers.sessions.get(depot)
        if session is None:
            raise ProtocolError(f"depot {depot} has no control connection")
        return session

    def _receive(self, reader: Reader, depot: str, session: LinkSession) -> None:
        receiver = BulkReceiver(reader, depot, self._hub.inbox, self._callbacks)
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
