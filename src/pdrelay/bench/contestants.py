"""Who moves bytes in a throughput comparison: our link, a bare socket loop, and other tools' scripts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import msgspec

from pdrelay.bench.children import Child, output_of, started
from pdrelay.bench.fleet import Fleet
from pdrelay.bench.producer import fresh_names
from pdrelay.depot.base import Transfer
from pdrelay.errors import BenchError

PEER_SECONDS = 120.0
MISSING = 3
"""Exit code of a peer's script that is not installed."""


class Sample(msgspec.Struct, frozen=True):
    """One measurement. `cpu_seconds` is of both ends."""

    bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


class Contestant(Protocol):
    """Moves bytes on demand. Raises BenchError."""

    async def measure(self) -> Sample:
        """One measurement."""
        ...


class MissingPeerError(BenchError):
    """The peer is not installed; the text is the remedy."""


class OurLink:
    """Depot to depot: pages are published beforehand, the clock runs from the gateway's call to the last page's end."""

    def __init__(self, fleet: Fleet, pages: int, page_bytes: int) -> None:
        self._fleet, self._pages, self._page_bytes = fleet, pages, page_bytes

    async def measure(self) -> Sample:
        """See Contestant."""
        sender, receiver = self._fleet.sender, self._fleet.receiver
        names, owner = fresh_names(self._pages), uuid4().hex
        await asyncio.to_thread(sender.engine.publish, owner, names)
        cpu, start = self._fleet.cpu_seconds(), time.monotonic()
        await sender.control.transfer(Transfer(xfer=owner, names=names, to=receiver.control.depot))
        async with asyncio.timeout(PEER_SECONDS):
            await receiver.control.wait(names)
        seconds, cpu = time.monotonic() - start, self._fleet.cpu_seconds() - cpu
        intact = await asyncio.to_thread(receiver.engine.count_intact, owner, names)
        await sender.control.end(owner)
        await asyncio.to_thread(sender.engine.release, owner)
        if intact != len(names):
            raise BenchError(f"{len(names) - intact} of {len(names)} pages arrived with other bytes than were sent")
        return Sample(len(names) * self._page_bytes, seconds, cpu)


class BareLoop:
    """The socket loop of `bare_loop.py`."""

    def __init__(self, sender: Child, receiver: Child, size: int) -> None:
        self._sender, self._receiver, self._size = sender, receiver, size

    async def measure(self) -> Sample:
        """See Contestant."""
        before = self._sender.cpu_seconds() + self._receiver.cpu_seconds()
        await self._receiver.tell(str(self._size))
        await self._receiver.line()
        await self._sender.tell(str(self._size))
        start, end = float(await self._sender.line(PEER_SECONDS)), float(await self._receiver.line(PEER_SECONDS))
        after = self._sender.cpu_seconds() + self._receiver.cpu_seconds()
        return Sample(self._size, end - start, after - before)


@asynccontextmanager
async def bare_loop(
    name: str, logs: Path, connections: int, chunk: int, memory: int, size: int, tls: Path | None
) -> AsyncIterator[BareLoop]:
    """A socket loop on this machine between `memory` bytes at each side, plain without `tls`. Raises BenchError."""
    shape, secrets = [str(connections), str(chunk), str(memory)], [str(tls)] if tls is not None else []
    module = "pdrelay.bench.bare_loop"
    async with started(f"{name}-receiver", module, ["receive", *shape, *secrets], logs) as receiver:
        address = f"127.0.0.1:{await receiver.line()}"
        async with started(f"{name}-sender", module, ["send", *shape, address, *secrets], logs) as sender:
            await sender.line()
            yield BareLoop(sender, receiver, size)


class Peer:
    """Another tool, behind its script in benchmarks/peers (whose README.md is the contract)."""

    def __init__(self, script: Path, connections: int, chunk: int, size: int, *further: str) -> None:
        self._script = script
        self._arguments = ["--connections", str(connections), "--bytes", str(size), "--chunk", str(chunk), *further]
        self.report: dict[str, object] = {}

    async def measure(self) -> Sample:
        """See Contestant. Raises MissingPeerError too."""
        if not self._script.is_file():
            raise MissingPeerError(f"no {self._script}: name the directory of the peers' scripts with --peers")
        code, output, errors = await output_of([sys.executable, str(self._script), *self._arguments], PEER_SECONDS)
        if code not in (0, MISSING):
            raise BenchError((errors.strip().splitlines() or [f"exit code {code}"])[-1])
        try:
            self.report = json.loads(output)
            if code == MISSING:
                raise MissingPeerError(str(self.report["missing"]))
            return msgspec.convert(self.report, Sample)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise BenchError(f"{self._script.name} printed no measurement: {error}") from error
