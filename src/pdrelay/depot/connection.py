"""A connection of framed messages on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pdrelay.depot import wire
from pdrelay.errors import ContractError, ProtocolError

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""For the first frame."""

MAX_UNSENT = 128 << 20
"""Bytes that may wait for a slow reader. The names of all pages of a large arena, told at once, are fewer."""

SILENT_LOOKS = 10
"""Looks in a row without a frame after which a connection that must ping is dead. Counted, not timed: the process that
was stopped may be our own."""


@dataclass(slots=True)
class Connections:
    """The connections of one listener, and why others were cut."""

    open: set[FrameProtocol] = field(default_factory=set)
    cut: Counter[str] = field(default_factory=Counter)

    def look(self) -> None:
        """Cuts those that fell silent. Call about once a second, where everyone pings more often than that."""
        for connection in list(self.open):
            connection.look()

    async def aclose(self) -> None:
        """Closes all."""
        for connection in list(self.open):
            connection.close()
        await asyncio.gather(*(connection.closed.wait() for connection in list(self.open)))


class Handler(Protocol):
    """What a connection's messages go to once its first one was accepted."""

    def handle(self, body: bytes, write: Callable[[bytes], None]) -> None:
        """Takes one message. Raises ContractError, ProtocolError, which end the connection."""
        ...

    def close(self) -> None:
        """The connection closed."""
        ...


class FrameProtocol(asyncio.Protocol):
    """Feeds frames to the handler that `open_` makes of the first one."""

    def __init__(self, open_: Callable[[bytes, FrameProtocol], Handler], connections: Connections) -> None:
        self._open, self._connections = open_, connections
        self._unframer = wire.Unframer()
        self._silent = 0  # looks without a frame
        self._hello_timer: asyncio.TimerHandle | None = None
        self._handler: Handler | None = None
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The other side's certificate, as `getpeercert()` gives it; None without TLS."""
        assert self._transport is not None
        found: dict[str, Any] | None = self._transport.get_extra_info("peercert")
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self._connections.open.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._cut, "no hello")

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        assert self._transport is not None
        self._silent = 0
        try:
            for body in self._unframer.feed(data):
                if self._transport.is_closing():
                    return
                if self._handler is None:
                    self._handler = self._open(body, self)
                    self._end_hello_timer()
                else:
                    self._handler.handle(body, self.write)
        except (ProtocolError, ContractError) as error:
            self.write(wire.failure(0, error))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connections.open.discard(self)
        self._end_hello_timer()
        self.closed.set()
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.close()

    def write(self, frame: bytes) -> None:
        """Sends a frame; does nothing once the connection is closing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
            if self._transport.get_write_buffer_size() > MAX_UNSENT:
                self._cut("slow reader")

    def look(self) -> None:
        """Cuts the connection when it was silent for too long."""
        self._silent += 1
        if self._silent > SILENT_LOOKS:
            self._cut("silent")

    def _cut(self, reason: str) -> None:
        """Ends the connection without a word: nobody would read it."""
        self._connections.cut[reason] += 1
        assert self._transport is not None
        logger.warning("cutting a connection from %s: %s", self._transport.get_extra_info("peername") or "here", reason)
        self._transport.abort()

    def _end_hello_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def write_with_fd(self, frame: bytes, fd: int) -> None:
        """Sends the first frame of a Unix socket together with a descriptor."""
        # Nothing was written to the transport before, so going around it keeps the order.
        assert self._transport is not None
        number = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as sock:
            sent = socket.send_fds(sock, [frame], [fd])
        assert sent == len(frame)

    def finish(self) -> None:
        """Closes the connection once what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()
