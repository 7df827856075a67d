"""How connections come in: bounded in number and time, and all on the event loop, so that a stranger gets no thread.

A connection that has not proved who it is costs a socket, a task and a place among `MAX_PENDING`. When all places are
taken the longest waiting one goes: whoever belongs here is through within a few round trips.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from pdrelay.depot import wire
from pdrelay.errors import ProtocolError

logger = logging.getLogger(__name__)

MAX_PENDING = 256
ADMIT_SECONDS = 10.0
"""From the first byte to the hello."""

ACCEPT_PAUSE = 0.1  # seconds after a failure
LOG_SECONDS = 10.0
"""Refusals are logged so often at most."""

_READ = 16 << 10
MAX_HELLO = 4 << 10
"""Bytes of a bulk connection's hello."""


class Admissions:
    """Accepts connections from a listening socket; `admit` takes each, or raises OSError or ProtocolError."""

    def __init__(self, listening: socket.socket, admit: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._listening, self._admit_one = listening, admit
        self._loop = asyncio.get_running_loop()
        self._pending: dict[asyncio.Task[None], None] = {}  # the longest waiting first
        self.refused = 0
        self._logged_at, self._logged = -LOG_SECONDS, 0
        self._task = asyncio.create_task(self._accept())

    @property
    def pending(self) -> int:
        """Connections that are neither in nor refused yet."""
        return len(self._pending)

    async def aclose(self) -> None:
        """Accepts no more and drops those that are pending."""
        tasks = [self._task, *self._pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        while True:
            try:
                sock = await self._next()
            except BlockingIOError:  # it left again
                continue
            except OSError as error:  # be it that no more files may be opened just now
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if len(self._pending) >= MAX_PENDING:
                next(iter(self._pending)).cancel()
            task = asyncio.create_task(self._admit(sock))
            self._pending[task] = None
            task.add_done_callback(partial(self._decided, sock))

    async def _next(self) -> socket.socket:
        """Waits with empty hands, so that nothing is lost when this is cancelled. Raises OSError."""
        readable = asyncio.Event()
        self._loop.add_reader(self._listening, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self._listening)
        sock, _ = self._listening.accept()
        sock.setblocking(False)
        return sock

    def _decided(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        del self._pending[task]
        if task.cancelled():  # perhaps before it began
            sock.close()

    async def _admit(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                await self._admit_one(sock)
        except (OSError, TimeoutError, ProtocolError) as error:
            self._refuse(sock, str(error) or type(error).__name__)
        except asyncio.CancelledError:
            self._refuse(sock, "too many at once")
            raise

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        sock.close()
        self.refused += 1
        if self._loop.time() - self._logged_at >= LOG_SECONDS:
            logger.warning("%d connections refused, the last one: %s", self.refused - self._logged, reason)
            self._logged_at, self._logged = self._loop.time(), self.refused


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

    async def read(self, size: int) -> bytes:
        """Exactly so many bytes of plaintext. Raises OSError."""
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


async def read_clear(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes of a non-blocking socket. Raises OSError."""
    data, loop = b"", asyncio.get_running_loop()
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return data


async def read_hello(read: Callable[[int], Awaitable[bytes]]) -> bytes:
    """The body of a bulk connection's first frame. Raises OSError, ProtocolError."""
    length = wire.body_length(await read(wire.HEADER.size))
    if length > MAX_HELLO:
        raise ProtocolError(f"a hello of {length} bytes, at most {MAX_HELLO} are allowed")
    return await read(length)
