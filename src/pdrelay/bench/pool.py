"""The transport that PDD's Table 2 describes: a pool of TCP connections, one for each transfer while it lasts.

A transfer waits, first come first served, for a free connection; each connection sends at most at a set rate. Two
processes: `python -m pdrelay.bench.pool receive ADDRESS`, and `... send ADDRESS CONNECTIONS RATE`, which takes lines of
JSON, `{"arrivals": [seconds], "sizes": [bytes]}`, and answers each with the moments of every transfer.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdrelay.bench.children import Child, started
from pdrelay.bench.line import ShapedLine
from pdrelay.bench.table2 import Moments
from pdrelay.cluster.units import parse_address

_SIZE = struct.Struct("<Q")
_MOMENT = struct.Struct("<d")
_BUFFER = 64 << 10
_BACKLOG = 1024
_SO_MAX_PACING_RATE = 47  # not in Python's socket module
_DRAIN_SECONDS = 120.0


async def _receive(address: str) -> None:
    loop = asyncio.get_running_loop()
    server = socket.create_server(parse_address(address), backlog=_BACKLOG)
    server.setblocking(False)
    print("listens", flush=True)
    tasks: set[asyncio.Task[None]] = set()
    while True:
        sock, _ = await loop.sock_accept(server)
        tasks.add(loop.create_task(_serve(sock)))


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_BUFFER))
    with sock:
        while True:
            if not await _fill(sock, buffer[: _SIZE.size]):
                return
            (left,) = _SIZE.unpack_from(buffer)
            while left:
                got = await loop.sock_recv_into(sock, buffer[: min(left, _BUFFER)])
                if not got:
                    return
                left -= got
            await loop.sock_sendall(sock, _MOMENT.pack(time.monotonic()))


async def _fill(sock: socket.socket, view: memoryview) -> bool:
    """Fills `view`; False when the connection ends."""
    at = 0
    while at < len(view):
        got = await asyncio.get_running_loop().sock_recv_into(sock, view[at:])
        if not got:
            return False
        at += got
    return True


class _Transfer(NamedTuple):
    began: float
    ended: float


async def _send(address: str, connections: int, rate: float) -> None:
    loop = asyncio.get_running_loop()
    free: asyncio.Queue[socket.socket] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(_connect(address, rate))
    data = memoryview(bytearray(_BUFFER))
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        work = json.loads(line)
        start = time.monotonic()
        arrivals = [start + arrival for arrival in work["arrivals"]]
        done = await asyncio.gather(
            *(_transfer(free, data, moment, size) for moment, size in zip(arrivals, work["sizes"], strict=True))
        )
        moments = Moments(arrivals, [one.began for one in done], [one.ended for one in done])
        print(msgspec.json.encode(moments).decode(), flush=True)


def _connect(address: str, rate: float) -> socket.socket:
    sock = socket.create_connection(parse_address(address))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    if math.isfinite(rate):
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(rate))
    sock.setblocking(False)
    return sock


async def _transfer(free: asyncio.Queue[socket.socket], data: memoryview, moment: float, size: int) -> _Transfer:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(moment - time.monotonic())
    sock = await free.get()
    began = time.monotonic()
    await loop.sock_sendall(sock, _SIZE.pack(size))
    for at in range(0, size, _BUFFER):
        await loop.sock_sendall(sock, data[: min(_BUFFER, size - at)])
    answer = memoryview(bytearray(_MOMENT.size))
    if not await _fill(sock, answer):
        raise ConnectionError("the receiver closed a connection")
    free.put_nowait(sock)
    return _Transfer(began, _MOMENT.unpack(answer)[0])


class Pool:
    """The benchmark's side of the two processes."""

    def __init__(self, sender: Child) -> None:
        self._sender = sender

    async def run(self, arrivals: Sequence[float], sizes: Sequence[int]) -> Moments:
        """Sends `sizes` bytes at `arrivals` seconds from now. Raises BenchError."""
        await self._sender.tell(json.dumps({"arrivals": list(arrivals), "sizes": list(sizes)}))
        answer = await self._sender.line(max(arrivals, default=0) + _DRAIN_SECONDS)
        return msgspec.json.decode(answer, type=Moments)


@asynccontextmanager
async def connected(line: ShapedLine, connections: int, rate: float, logs: Path) -> AsyncIterator[Pool]:
    """A pool of so many connections over the line, each of at most `rate` bytes per second (math.inf: no limit)."""
    start = partial(started, module=__name__, logs=logs)
    where = line.other
    async with start("pool-receiver", arguments=["receive", where.listen],
                     namespace=line.receiver_namespace) as receiver:  # fmt: skip
        await receiver.line()
        async with start("pool-sender", arguments=["send", where.dial, str(connections), str(rate)],
                         namespace=line.sender_namespace) as sender:  # fmt: skip
            await sender.line()
            yield Pool(sender)


def _main(role: str, address: str, *further: str) -> None:
    if role == "receive":
        asyncio.run(_receive(address))
    else:
        connections, rate = further
        asyncio.run(_send(address, int(connections), float(rate)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
