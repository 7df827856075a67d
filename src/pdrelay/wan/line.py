"""A wide-area line in user space: TCP connections forwarded at a set rate and round-trip time.

Each route listens on a local address and forwards to a target. All routes share the line: one shaper a direction,
*forward* from the connecting side to the target, *reverse* back. A connection holds at most about rate * rtt + 64 KiB
a direction, so senders feel backpressure. A new connection costs one round trip before its first byte is taken.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, cast

from pdrelay.errors import StartError
from pdrelay.wan.shaper import Flow, Lane, Piece, Shaper, Signal

_SLACK = 64 << 10
_SEGMENT = 1448
_MAX_WINDOW = 4 << 20
_READ = 256 << 10

Address = tuple[str, int]


class Route(NamedTuple):
    """What is forwarded: connections to `listen` go to `target`."""

    lane: Lane
    listen: Address
    target: Address


class Line:
    """The line. `rate` in bytes per second each direction (math.inf: unlimited), `rtt` in seconds."""

    def __init__(self, routes: Iterable[Route], rate: float, rtt: float) -> None:
        self.routes = tuple(routes)
        self.rate, self.rtt = rate, rtt
        self.forward, self.reverse = Shaper(rate, rtt / 2), Shaper(rate, rtt / 2)
        self.connections = 0  # ever accepted
        self._servers: list[asyncio.Server] = []
        self._ends: set[End] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self._no_ends = asyncio.Event()
        self._no_ends.set()

    @property
    def window(self) -> int:
        """Bytes that a connection may have under way in one direction."""
        return int(min(_MAX_WINDOW, self.rate * self.rtt + _SLACK)) if math.isfinite(self.rate) else _MAX_WINDOW

    @property
    def open_sockets(self) -> int:
        """Sockets of connections through the line."""
        return len(self._ends)

    async def start(self) -> None:
        """Listens on every route. Raises StartError when an address is taken."""
        loop = asyncio.get_running_loop()
        for route in self.routes:
            try:
                server = await loop.create_server(partial(self._accept, route), *route.listen)
            except OSError as error:
                await self.aclose()
                raise StartError(f"line: cannot listen on {_text(route.listen)}: {error.strerror}") from error
            self._servers.append(server)
            for sock in server.sockets:  # packets as on Ethernet: one of the loopback's 64 KiB can exceed the window
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)

    def set_rate(self, rate: float) -> None:
        """Changes the rate of both directions."""
        self.rate = rate
        for shaper in (self.forward, self.reverse):
            shaper.set(rate=rate)
        for end in self._ends:
            end.limit_kernel()
            end.update_reading()

    def set_rtt(self, rtt: float) -> None:
        """Changes the round-trip time."""
        self.rtt = rtt
        for shaper in (self.forward, self.reverse):
            shaper.set(delay=rtt / 2)

    def cut(self) -> int:
        """Breaks every connection at once; how many."""
        sockets = len(self._ends)
        for task in list(self._dials):
            task.cancel()
        for end in list(self._ends):
            end.abort()
        return (sockets + 1) // 2

    async def aclose(self) -> None:
        """Stops listening and breaks all connections."""
        for server in self._servers:
            server.close()
        self.cut()
        await asyncio.gather(*self._dials, return_exceptions=True)
        await self._no_ends.wait()
        self.forward.close()
        self.reverse.close()

    def _accept(self, route: Route) -> End:
        client, server = End(self, self.forward, route.lane), End(self, self.reverse, route.lane)
        client.peer, server.peer = server, client
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._dial(client, server, route.target))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return client

    async def _dial(self, client: End, server: End, target: Address) -> None:
        """The handshake: half a round trip to the target and half back."""
        try:
            await asyncio.sleep(self.rtt / 2)
            await asyncio.get_running_loop().create_connection(lambda: server, *target)
            await asyncio.sleep(self.rtt / 2)
        except (OSError, asyncio.CancelledError):
            client.abort()
            server.abort()
            return
        client.ready = server.ready = True
        client.update_reading()
        server.update_reading()

    def joined(self, end: End) -> None:
        """An end got its socket."""
        self._ends.add(end)
        self._no_ends.clear()

    def left(self, end: End) -> None:
        """An end lost its socket."""
        self._ends.discard(end)
        if not self._ends:
            self._no_ends.set()


class End(asyncio.BufferedProtocol):
    """One socket of a connection. What it reads travels through `shaper` and is written by `peer`."""

    peer: End

    def __init__(self, line: Line, shaper: Shaper, lane: Lane) -> None:
        self.ready = False  # the handshake is over
        self._line, self._shaper = line, shaper
        self._flow = Flow(lane, self._arrived)
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_READ))
        self._writable = True
        self._read_ended = self._write_ended = self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is there. Nothing is read before the handshake is over."""
        self._transport = cast("asyncio.Transport", transport)
        self._line.joined(self)
        if math.isfinite(self._line.rate):
            self.limit_kernel()
        asyncio.get_running_loop().call_soon(self._hold)  # Python 3.11.2 begins to read after this, paused or not
        if self.peer._lost:
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """asyncio: where to read to. Never more than the window has room for."""
        return self._buffer[: max(1, self._line.window - self._flow.pending)]

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: bytes were read."""
        self._shaper.put(self._flow, memoryview(bytes(self._buffer[:nbytes])))
        self.update_reading()

    def eof_received(self) -> bool:
        """asyncio: the sender closed its half; the other stays open."""
        self._read_ended = True
        self._shaper.put(self._flow, Signal.END)
        return not self._write_ended

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the socket is gone, because we closed it or because it broke."""
        self._lost = True
        self._line.left(self)
        if not (self._read_ended and self._write_ended):
            self._shaper.put(self._flow, Signal.RESET)

    def pause_writing(self) -> None:
        """asyncio: the receiver does not take what arrived."""
        self._writable = False
        self.peer.update_reading()

    def resume_writing(self) -> None:
        """asyncio: the receiver takes again."""
        self._writable = True
        self.peer.update_reading()

    def update_reading(self) -> None:
        """Reads from the sender while the window has room and the receiver takes what arrived."""
        if self._transport is None or self._lost or self._read_ended or not self.ready:
            return
        if self._flow.pending < self._line.window and self.peer._writable:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _hold(self) -> None:
        if self._transport is not None and not self.ready:
            self._transport.pause_reading()

    def limit_kernel(self) -> None:
        """Keeps the kernel's receive buffer small on a slow line: what it holds, the sender takes for delivered."""
        if self._transport is not None:
            connection: socket.socket = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._line.window)

    def abort(self) -> None:
        """Breaks the connection on this side; the other side learns it after the delay."""
        if self._transport is not None:
            self._transport.abort()

    def _arrived(self, piece: Piece) -> None:
        if piece is Signal.RESET:
            self.peer.abort()
        elif piece is Signal.END:
            self.peer._end_writing()
        else:
            self.peer._write(piece)
            self.update_reading()

    def _write(self, data: memoryview) -> None:
        if self._transport is not None and not self._lost:
            self._transport.write(data)

    def _end_writing(self) -> None:
        self._write_ended = True
        if self._transport is None or self._lost:
            return
        if self._read_ended:
            self._transport.close()
        else:
            try:
                self._transport.write_eof()
            except OSError:  # a reset came that the event loop has not told of yet
                self.abort()


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
