"""A line between two depots that does to their connections what lines do, and what they should not."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.units import parse_address
from pdrelay.wan.line import Line as ShapedLine
from pdrelay.wan.line import Route
from pdrelay.wan.shaper import Lane

Way = Literal["there", "back"]
WAYS: tuple[Way, Way] = "there", "back"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


@dataclass(slots=True, eq=False)
class Pipe:
    """One forwarded connection."""

    lane: Lane
    writers: dict[Way, asyncio.StreamWriter]
    lost: bool = False  # bytes of it were swallowed: no stream any more


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Trouble:
    """What happens to the connections of one lane just now."""

    swallow: frozenset[Way] = frozenset()
    open: dict[Way, asyncio.Event] = field(default_factory=lambda: {way: _set() for way in WAYS})
    """Cleared: nothing is read, and the sender meets a full buffer."""
    flips: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))  # bits still to be turned over


class FaultLine:
    """Two addresses, for control and bulk connections, that lead to `port` over a line of a rate and a delay."""

    def __init__(self, port: int, rng: random.Random) -> None:
        """Move `port` to lead new connections elsewhere."""
        self.port, self._rng = port, rng
        self.control, self.bulk = free_addresses(2)
        self.trouble = {lane: Trouble() for lane in Lane}
        self.pipes: set[Pipe] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self.shaped: ShapedLine | None = None

    async def start(self, rate: float = math.inf, rtt: float = 0.0) -> None:
        """Opens both addresses. `rate` in bytes per second, `rtt` in seconds."""
        routes = []
        for lane, address in ((Lane.CONTROL, self.control), (Lane.BULK, self.bulk)):
            server = await asyncio.start_server(
                lambda reader, writer, lane=lane: self._serve(reader, writer, lane), "127.0.0.1", 0, limit=64 << 10
            )
            self._servers.append(server)
            routes.append(Route(lane, parse_address(address), server.sockets[0].getsockname()))
        self.shaped = ShapedLine(routes, rate, rtt)
        await self.shaped.start()

    async def aclose(self) -> None:
        """Closes everything."""
        assert self.shaped is not None
        await self.shaped.aclose()
        for server in self._servers:
            server.close()
        self.reset()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)

    def reset(self, *pipes: Pipe) -> None:
        """Resets these connections, or all."""
        for writer in [writer for pipe in pipes or list(self.pipes) for writer in pipe.writers.values()]:
            with suppress(OSError):
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()

    def heal(self) -> None:
        """Bytes pass again. Of connections that lost some nothing comes any more: they stay half-open."""
        for trouble in self.trouble.values():
            trouble.swallow = frozenset()
            for gate in trouble.open.values():
                gate.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self.port, limit=64 << 10)
        except OSError:
            writer.transport.abort()
            return
        pipe = Pipe(lane, {"there": onward, "back": writer})
        self.pipes.add(pipe)
        for source, way in ((reader, WAYS[0]), (there, WAYS[1])):
            task = asyncio.create_task(self._pump(pipe, source, way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, pipe: Pipe, reader: asyncio.StreamReader, way: Way) -> None:
        trouble, sink = self.trouble[pipe.lane], pipe.writers[way]
        with suppress(OSError):
            while data := await reader.read(16 << 10):
                await trouble.open[way].wait()
                pipe.lost = pipe.lost or way in trouble.swallow
                if pipe.lost:
                    continue
                sink.write(self._flipped(data, trouble, way))
                await sink.drain()
        self.pipes.discard(pipe)
        for writer in pipe.writers.values():
            writer.close()

    def _flipped(self, data: bytes, trouble: Trouble, way: Way) -> bytes:
        if not trouble.flips[way]:
            return data
        trouble.flips[way] -= 1
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)
