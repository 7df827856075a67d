"""A connection of framed messages on the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

from pdrelay.depot import wire
from pdrelay.errors import ContractError, ProtocolError


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

    def __init__(self, open_: Callable[[bytes, FrameProtocol], Handler], connections: set[FrameProtocol]) -> None:
        self._open, self._connections = open_, connections
        self._unframer = wire.Unframer()
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
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        assert self._transport is not None
        try:
            for body in self._unframer.feed(data):
                if self._transport.is_closing():
                    return
                if self._handler is None:
                    self._handler = self._open(body, self)
                else:
                    self._handler.handle(body, self.write)
        except (ProtocolError, ContractError) as error:
            self.write(wire.failure(0, error))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._connections.discard(self)
        self.closed.set()
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.close()

    def write(self, frame: bytes) -> None:
        """Sends a frame; does nothing once the connection is closing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

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
