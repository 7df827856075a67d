"""The in-memory twin of NIXL agents: as unordered and as late as the real ones may be, one step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from pdrelay.depot.link_messages import Endpoint
from pdrelay.depot.nixl.base import AgentListener, Piece
from pdrelay.errors import DepotError

CHUNK = 512
"""A step copies so many bytes."""

DYING_TURNS = 20
"""Turns of the event loop between the order to end and the end."""


@dataclass(eq=False)
class _Write:
    """A batch on its way. Its bytes are read from the sender's arena as they are copied, or were when it ended."""

    source: MemoryAgent
    target: bytes
    batch: int
    note: bytes
    pieces: list[Piece]
    taken: list[bytes] = field(default_factory=list)  # of the pieces, once the sender's agent is gone


class Fabric:
    """Joins the agents of any number of depots."""

    def __init__(self, on_land: Callable[[int, bytes], None] | None = None) -> None:
        """`on_land` is told offset and bytes of each chunk before it lands."""
        self._on_land = on_land
        self.agents: dict[bytes, MemoryAgent] = {}
        self._writes: list[_Write] = []
        self._events: list[Callable[[], None]] = []
        self._numbers = count(1)

    @property
    def pending(self) -> int:
        """How many things can happen next."""
        return len(self._writes) + len(self._events)

    @property
    def writing(self) -> bool:
        """Whether chunks are on their way."""
        return bool(self._writes)

    def step(self, choice: int = 0) -> None:
        """Lets one of the `pending` things happen: a chunk lands, a batch is told to be written, a note arrives."""
        at = choice % self.pending
        if at < len(self._writes):
            self._copy(self._writes[at])
        else:
            self._events.pop(at - len(self._writes))()

    def add(self, agent: MemoryAgent) -> bytes:
        """An agent started; its metadata."""
        metadata = f"agent {next(self._numbers)}".encode()
        self.agents[metadata] = agent
        return metadata

    def remove(self, agent: MemoryAgent, metadata: bytes) -> None:
        """The agent is gone. What it had sent lands all the same; what was for it lands no more."""
        self.agents.pop(metadata, None)
        for write in [write for write in self._writes if write.source is agent]:
            write.taken = [bytes(agent.arena[piece.here : piece.here + piece.size]) for piece in write.pieces]
        for write in [write for write in self._writes if write.target == metadata]:
            self._writes.remove(write)
            self._events.append(partial(write.source.fail, "the far agent is gone"))

    def send(self, source: MemoryAgent, target: bytes, batch: int, pieces: Sequence[Piece], note: bytes) -> None:
        """Puts a batch on its way."""
        chunks = [
            Piece(piece.here + at, piece.there + at, min(CHUNK, piece.size - at))
            for piece in pieces
            for at in range(0, piece.size, CHUNK)
        ]
        self._writes.append(_Write(source, target, batch, note, chunks))

    def tell(self, target: bytes, note: bytes) -> None:
        """Puts a note on its way. It may overtake others."""

        def arrive() -> None:
            if (agent := self.agents.get(target)) is not None:
                agent.hear(note)

        self._events.append(arrive)

    def _copy(self, write: _Write) -> None:
        agent = self.agents.get(write.target)
        assert agent is not None
        if write.pieces:
            here, there, size = write.pieces.pop()
            data = write.taken.pop() if write.taken else bytes(write.source.arena[here : here + size])
            if self._on_land is not None:
                self._on_land(there, data)
            agent.arena[there : there + size] = data
        if not write.pieces:
            self._writes.remove(write)
            self._events.append(partial(write.source.finish, write.batch))
            self.tell(write.target, write.note)


class MemoryAgent:
    """An `Agent` on a `Fabric`."""

    path = "nixl twin"

    def __init__(self, fabric: Fabric, arena: memoryview, listener: AgentListener) -> None:
        self.arena = arena
        self._fabric, self._listener = fabric, listener
        self._metadata = b""
        self._far = b""
        self._closed = False

    async def start(self) -> Endpoint:
        """See Agent."""
        if self._closed:
            raise DepotError("closed")
        self._metadata = self._fabric.add(self)
        return Endpoint(self._metadata, 0, 0)

    async def connect(self, far: Endpoint) -> None:
        """See Agent."""
        if far.metadata not in self._fabric.agents:
            raise DepotError("the far agent is gone")
        self._far = far.metadata

    def write(self, batch: int, pieces: Sequence[Piece], note: bytes) -> None:
        """See Agent."""
        if self._far in self._fabric.agents:
            self._fabric.send(self, self._far, batch, pieces, note)
        else:
            self.fail("the far agent is gone")

    def notify(self, note: bytes) -> None:
        """See Agent."""
        self._fabric.tell(self._far, note)

    def close(self) -> None:
        """See Agent."""
        self._closed = True

    async def aclose(self) -> None:
        """See Agent."""
        self.close()
        for _ in range(DYING_TURNS):
            await asyncio.sleep(0)
        self._fabric.remove(self, self._metadata)

    def finish(self, batch: int) -> None:
        """A batch of ours has arrived."""
        if not self._closed:
            self._listener.written(batch)

    def hear(self, note: bytes) -> None:
        """A note arrived."""
        if not self._closed:
            self._listener.notified(note)

    def fail(self, detail: str) -> None:
        """It works no more."""
        if not self._closed:
            self._closed = True
            self._listener.broken(detail)
