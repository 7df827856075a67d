"""Lanes over TCP: a pool of TLS connections, a thread each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay.depot import bulk_sender, wire
from pdrelay.depot import link_messages as link
from pdrelay.depot.bulk_sender import BatchQueue, BulkSender
from pdrelay.depot.channel import TlsWriter, Writer
from pdrelay.depot.lanes import FarEndpoint, LaneOwner
from pdrelay.depot.link_messages import Transport
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.payload import RunEncoder
from pdrelay.depot.sockets import CONNECT_SECONDS, dial_bulk, join_thread
from pdrelay.depot.tcp_info import tcp_info

BATCHES_AHEAD = 2  # handed to a thread: one it writes, one so that it need not wait for the event loop


WATCH_SECONDS = 0.25


class Far(NamedTuple):
    """The far end of bulk connections."""

    depot: str
    address: str
    connections: int


@dataclass(slots=True)
class Lane:
    """One bulk connection as the event loop sees it."""

    batches: BatchQueue | None = None  # None while it is not connected
    closing: bool = False
    unwritten: dict[int, FlyingBatch] = field(default_factory=dict)  # the thread may still read their bytes
    unacked: dict[int, FlyingBatch] = field(default_factory=dict)


class TcpLanes:
    """`Lanes` over `far.connections` TLS connections, each made again when it breaks."""

    transport: Transport = "tcp"
    path = "tcp"

    def __init__(
        self, far: Far, tls: ssl.SSLContext, depot: str, arena: memoryview, encoder: RunEncoder, owner: LaneOwner
    ) -> None:
        """`depot` is our own name. Needs a running event loop."""
        self._far, self._tls, self._depot, self._arena, self._encoder = far, tls, depot, arena, encoder
        self._owner = owner
        self._mailbox = Mailbox(owner.lanes_ready)
        self._callbacks = bulk_sender.Callbacks(self._mailbox.post, self._on_open, self._on_written, self._on_broken)
        self._lanes: dict[BulkSender, Lane] = {}
        self._senders: list[BulkSender] = []
        self._watch = asyncio.create_task(self._watch_connections())

    async def prepare(self, far: FarEndpoint) -> None:
        """See Lanes. Connections are made once the link is up."""

    def open(self) -> None:
        """See Lanes."""
        self._senders = [sender for sender in self._senders if sender.thread.is_alive()]
        for _ in range(self._far.connections):
            sender = BulkSender(self._far.depot, self._dial, self._arena, self._encoder, self._callbacks)
            self._lanes[sender] = Lane()
            self._senders.append(sender)

    def close(self) -> None:
        """See Lanes."""
        for sender, lane in list(self._lanes.items()):
            lane.batches, lane.closing = None, True
            sender.stop()
            if not lane.unwritten:
                self._forget(sender, lane)

    def room(self) -> bool:
        """See Lanes."""
        return self._idlest() is not None

    def put(self, batch: FlyingBatch) -> None:
        """See Lanes."""
        lane = self._idlest()
        assert lane is not None
        assert lane.batches is not None
        lane.unwritten[batch.header.batch] = lane.unacked[batch.header.batch] = batch
        lane.batches.put(batch, urgent=True)

    def acked(self, number: int) -> FlyingBatch | None:
        """See Lanes."""
        for lane in self._lanes.values():
            if (batch := lane.unacked.pop(number, None)) is not None:
                return batch
        return None

    def revoke(self, grants: Sequence[int]) -> None:
        """See Lanes. Whoever receives over connections grants nothing."""

    async def aclose(self) -> None:
        """See Lanes."""
        self._watch.cancel()
        for sender in self._senders:
            await join_thread(sender.thread, CONNECT_SECONDS)

    def _dial(self) -> Writer:
        """In a bulk connection's thread."""
        writer = TlsWriter(dial_bulk(self._far.address, self._tls, self._far.depot))
        writer.send([wire.frame(link.BulkHello(depot=self._depot))])
        return writer

    async def _watch_connections(self) -> None:
        """Breaks connections that the far end has ended: what it has not read must go over another one, though there
        may be nothing more to write that would show it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for sender, lane in list(self._lanes.items()):
                sock = sender.sock if lane.batches is not None else None
                info = tcp_info(sock) if sock is not None else None
                if info is not None and not info.alive:
                    sender.interrupt()

    def _idlest(self) -> Lane | None:
        best, fewest = None, BATCHES_AHEAD
        for lane in self._lanes.values():
            if lane.batches is not None and len(lane.unwritten) < fewest:
                best, fewest = lane, len(lane.unwritten)
        return best

    def _on_open(self, sender: BulkSender, batches: BatchQueue) -> None:
        if (lane := self._lanes.get(sender)) is not None and not lane.closing:
            lane.batches = batches

    def _on_written(self, sender: BulkSender, batch: FlyingBatch) -> None:
        lane = self._lanes.get(sender)
        if lane is not None and lane.unwritten.pop(batch.header.batch, None) is not None:
            self._owner.batch_written(batch)

    def _on_broken(self, sender: BulkSender) -> None:
        if (lane := self._lanes.get(sender)) is not None:
            self._forget(sender, lane)

    def _forget(self, sender: BulkSender, lane: Lane) -> None:
        """The thread touches the arena no more: what it had not delivered must go over other lanes."""
        if lane.closing:
            del self._lanes[sender]
        else:
            self._lanes[sender] = Lane()
        for batch in lane.unwritten.values():
            self._owner.batch_written(batch)
        for batch in lane.unacked.values():
            self._owner.batch_failed(batch)
