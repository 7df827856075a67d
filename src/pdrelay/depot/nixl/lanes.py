"""Lanes over NIXL: batches become writes straight into the far arena."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pdrelay.depot import link_messages as link
from pdrelay.depot.lanes import FarEndpoint, LaneOwner, LaneUse
from pdrelay.depot.link_messages import Endpoint
from pdrelay.depot.nixl.base import Agent, MakeAgent, Piece
from pdrelay.depot.outbox import FlyingBatch, FlyingRun
from pdrelay.depot.payload import RunEncoder, encoded

_notes = msgspec.msgpack.Encoder()


class NixlLanes:
    """`Lanes` with an agent for each conversation. `ahead` batches are written at once."""

    transport: link.Transport = "nixl"

    def __init__(
        self, make_agent: MakeAgent, ahead: int, arena: memoryview, encoder: RunEncoder, owner: LaneOwner
    ) -> None:
        self._make_agent, self._ahead, self._owner = make_agent, ahead, owner
        self._arena, self._encoder = arena, encoder
        self._agent: Agent | None = None
        self._starting: asyncio.Task[Endpoint] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._open = False
        self._unwritten: dict[int, FlyingBatch] = {}
        self._unacked: dict[int, FlyingBatch] = {}
        self._flying: Counter[int] = Counter()  # grants of the unwritten batches' runs
        self._revoked: set[int] = set()  # of those: to be closed once nothing of them flies

    @property
    def path(self) -> str:
        """See Lanes."""
        return self._agent.path if self._agent is not None else self.transport

    async def prepare(self, far: FarEndpoint) -> None:
        """See Lanes."""
        await self.aclose()
        self._agent = self._make_agent(self)
        # Cancelled half-way, it might leave a process that nobody knows of.
        self._starting = asyncio.create_task(self._agent.start())
        await asyncio.shield(self._starting)
        await self._agent.connect(await far())

    def open(self) -> None:
        """See Lanes."""
        self._open = True
        self._owner.lanes_ready()

    def close(self) -> None:
        """See Lanes."""
        self._open = False
        for number in [number for number in self._unacked if number not in self._unwritten]:
            self._owner.batch_failed(self._unacked.pop(number))
        if self._agent is not None and self._ending is None:
            self._agent.close()
            self._ending = asyncio.create_task(self._end(self._agent))

    def room(self, xfer: str, urgency: int) -> bool:
        """See Lanes."""
        return self._open and len(self._unwritten) < self._ahead

    def put(self, batch: FlyingBatch) -> None:
        """See Lanes."""
        assert self._agent is not None
        grants = _grants(batch)
        assert not grants & self._revoked, "INV-NIXL-4: nothing is written under a revoked grant"
        self._flying.update(grants)
        self._unwritten[batch.header.batch] = self._unacked[batch.header.batch] = batch
        header, _ = encoded(batch, self._arena, self._encoder)
        pieces = list(joined(_piece(run) for run in batch.runs))
        self._agent.write(batch.header.batch, pieces, _notes.encode(header))

    def acked(self, number: int) -> FlyingBatch | None:
        """See Lanes."""
        return self._unacked.pop(number, None)

    def revoke(self, grants: Sequence[int]) -> None:
        """See Lanes."""
        self._close_grants([grant for grant in grants if not self._flying[grant]])
        self._revoked.update(grant for grant in grants if self._flying[grant])

    def on_secrets(self, secrets: Sequence[bytes]) -> None:
        """See Lanes. Nothing is in clear."""

    def warm(self, round_trip_bytes: float, padding: Callable[[int], FlyingBatch]) -> list[FlyingBatch]:
        """See Lanes. There is nothing to open."""
        return []

    def use(self) -> LaneUse:
        """See Lanes."""
        return LaneUse(self._ahead if self._open else 0, len(self._unwritten))

    def adapt(self, rate: float) -> None:
        """See Lanes. Nothing waits in buffers."""

    async def aclose(self) -> None:
        """See Lanes."""
        self.close()
        if self._ending is not None:
            await self._ending
            self._agent = self._ending = None

    # See AgentListener.

    def written(self, batch: int) -> None:
        """See AgentListener."""
        done = self._unwritten.pop(batch)
        self._flying.subtract(_grants(done))
        through = [grant for grant in self._revoked if not self._flying[grant]]
        self._revoked.difference_update(through)
        self._flying += Counter()  # forgets the zeros
        self._close_grants(through)
        self._owner.batch_written(done)
        self._owner.lanes_ready()

    def notified(self, note: bytes) -> None:
        """See AgentListener. A receiver sends none."""

    def broken(self, detail: str) -> None:
        """See AgentListener."""
        self._owner.lanes_broken(detail)

    def _close_grants(self, grants: Sequence[int]) -> None:
        if grants and self._agent is not None and self._open:
            self._agent.notify(_notes.encode(link.Closed(list(grants))))

    async def _end(self, agent: Agent) -> None:
        """Waits for the end of `agent`: only then nobody reads what was to be written, and it may be sent again."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await agent.aclose()
        unwritten, self._unwritten = self._unwritten, {}
        unacked, self._unacked = self._unacked, {}
        self._flying, self._revoked = Counter(), set()
        for batch in unwritten.values():
            self._owner.batch_written(batch)
        for batch in unacked.values():
            self._owner.batch_failed(batch)
        self._owner.lanes_ready()


def _grants(batch: FlyingBatch) -> set[int]:
    return {run.wanted.place.grant for run in batch.runs}


def _piece(run: FlyingRun) -> Piece:
    start, size = run.first * run.page.layout.part_bytes, run.parts * run.page.layout.part_bytes
    return Piece(run.page.offset + start, run.wanted.place.offset + start, size)


def joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same bytes with neighbours on both sides made one."""
    before: Piece | None = None
    for piece in pieces:
        if before is not None and (before.here + before.size, before.there + before.size) == piece[:2]:
            before = before._replace(size=before.size + piece.size)
            continue
        if before is not None:
            yield before
        before = piece
    if before is not None:
        yield before
