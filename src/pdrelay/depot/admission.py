"""TLS with a new bulk connection, on the event loop: a stranger never gets a thread."""

from __future__ import annotations

import asyncio
import socket
import ssl

from pdrelay.depot import wire
from pdrelay.errors import ProtocolError

_READ = 16 << 10
MAX_HELLO = 4 << 10
"""Bytes of a bulk connection's hello."""


class BulkHandshake:
    """The server's side of TLS over a non-blocking socket, until the connection's first frame."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self._outgoing, server_side=True)

    async def complete(self) -> None:
        """Shakes hands. Raises OSError, ssl.SSLError included."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._refill()
            else:
                await self._flush()
                return

    async def read_frame(self) -> bytes:
        """The body of the first frame. Raises OSError, ProtocolError."""
        length = wire.body_length(await self._read(wire.HEADER.size))
        if length > MAX_HELLO:
            raise ProtocolError(f"a hello of {length} bytes, at most {MAX_HELLO} are allowed")
        return await self._read(length)

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self.tls.read(size - len(data))
            except ssl.SSLWantReadError:
                await self._refill()
                continue
            if not piece:
                raise ConnectionError("the other side closed the connection")
            data += piece
        return data

    async def _refill(self) -> None:
        data = await self._loop.sock_recv(self._sock, _READ)
        if not data:
            raise ConnectionError("the other side closed the connection")
        self.incoming.write(data)

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self._sock, self._outgoing.read())
