"""TCP and TLS between depots and gateways.

A connection's first byte, before TLS begins, says what it is for: control connections are served by the event loop,
bulk connections by threads, and a TLS connection cannot move from one to the other.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from typing import Any

from pdrelay.cluster.units import parse_address
from pdrelay.depot import wire
from pdrelay.errors import ProtocolError

CONTROL, BULK, CLEAR = b"C", b"B", b"P"
CONNECT_SECONDS = 10.0
DEAD_PEER_MS = 30_000

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def tune(sock: socket.socket) -> None:
    """No delay for small messages, and an end for connections whose other side vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)


async def dial_control(address: str, tls: ssl.SSLContext, server_name: str) -> Streams:
    """A control connection to part `server_name`. Raises OSError, ssl.SSLError included, and TimeoutError."""
    async with asyncio.timeout(CONNECT_SECONDS):
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(*parse_address(address), type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = infos[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, target)
            tune(sock)
            await loop.sock_sendall(sock, CONTROL)
            return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=server_name)
        except BaseException:
            sock.close()
            raise


def dial_bulk(address: str, tls: ssl.SSLContext, server_name: str) -> ssl.SSLSocket:
    """A blocking connection to part `server_name` for bulk. Raises OSError, ssl.SSLError included."""
    raw = dial_clear(address, BULK)
    try:
        sock = tls.wrap_socket(raw, server_hostname=server_name)
    except BaseException:
        raw.close()
        raise
    sock.settimeout(None)
    return sock


def dial_clear(address: str, purpose: bytes = CLEAR) -> socket.socket:
    """A connection without TLS that has said what it is for. Blocks, no longer than CONNECT_SECONDS unless `purpose` is
    CLEAR. Raises OSError."""
    raw = socket.create_connection(parse_address(address), CONNECT_SECONDS)
    try:
        tune(raw)
        raw.sendall(purpose)
    except BaseException:
        raw.close()
        raise
    raw.settimeout(None if purpose == CLEAR else CONNECT_SECONDS)
    return raw


def certificate_names(certificate: dict[str, Any] | None) -> set[str]:
    """The DNS names that the other side's certificate is for, from `getpeercert()`."""
    return {value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"}


def require_name(depot: str, certificate: dict[str, Any] | None) -> None:
    """Raises ProtocolError unless the other side's certificate is that of `depot`."""
    names = certificate_names(certificate)
    if depot not in names:
        raise ProtocolError(
            f"a certificate for {', '.join(sorted(names)) or 'nobody'} cannot speak for depot {depot!r}"
        )


def shut(sock: socket.socket) -> None:
    """Breaks the connection from any thread: whoever is blocked on it gets an error."""
    try:
        # Not SSLSocket's own method: that takes the TLS state away from under the thread that uses it.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame. Raises asyncio.IncompleteReadError at the end, ProtocolError."""
    return await reader.readexactly(wire.body_length(await reader.readexactly(wire.HEADER.size)))


async def join_thread(thread: threading.Thread, seconds: float) -> None:
    """Waits until `thread` has ended, at most so long."""
    await asyncio.to_thread(thread.join, seconds)
