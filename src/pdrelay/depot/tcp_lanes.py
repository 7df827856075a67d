"""Lanes over TCP: a pool of connections, with TLS or in clear, a thread each."""

from __future__ import annotations

import asyncio
import logging
import queue
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay.cluster.topology import Encryption
from pdrelay.depot import bulk_sender, wire
from pdrelay.depot import link_messages as link
from pdrelay.depot.bulk_sender import URGENCIES, BatchQueue, BulkSender
from pdrelay.depot.channel import PlainWriter, TlsWriter, Writer
from pdrelay.depot.lanes import FarEndpoint, LaneOwner, LaneUse
from pdrelay.depot.link_messages import Transport
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.payload import RunEncoder
from pdrelay.depot.sockets import CONNECT_SECONDS, dial_bulk, dial_clear, join_thread
from pdrelay.depot.tcp_info import TcpInfo, tcp_info
from pdrelay.depot.tcp_options import set_congestion, set_pace, set_unsent

logger = logging.getLogger(__name__)

BATCHES_AHEAD = 2  # handed to a thread: one it writes, one so that it need not wait for the event loop
WATCH_SECONDS = 0.25
UNANSWERED_LOOKS = 60
"""Looks in a row, `WATCH_SECONDS` apart, that find all of a connection's bytes with the far kernel and no batch
acknowledged: they are lost in between, or the far end has lost its place among them. 15 s: more than a proxy holds back
on a line whose rate fell tenfold. Counted, not timed: the process that was stopped may be our own."""

MIN_WARM, MAX_WARM = 64 << 10, 1 << 20
"""Bytes of padding that open a connection's congestion window; less is there from the start."""

COLD_SECONDS = 1.0
"""A connection that was idle for so long may have lost its congestion window."""


class TcpSettings(NamedTuple):
    """A link's bulk connections."""

    depot: str
    address: str
    connections: int
    per_transfer: int = 0  # connections that one transfer may use; 0: all, and connections serve several
    congestion: str = ""
    pace: float | None = None  # bytes per second, of each
    encryption: Encryption = "tls"


@dataclass(slots=True, eq=False)
class Lane:
    """One bulk connection as the event loop sees it."""

    batches: BatchQueue | None = None  # None while it is not connected
    closing: bool = False
    unwritten: dict[int, FlyingBatch] = field(default_factory=dict)  # the thread may still read their bytes
    unacked: dict[int, FlyingBatch] = field(default_factory=dict)
    used: float = float("-inf")  # when something was under way last
    unanswered: int = 0  # looks in a row

    def load(self, urgency: int) -> int:
        """Batches that one of this urgency would wait for. Less urgent ones are overtaken, unless they have begun."""
        if not self.unwritten:
            return 0
        return max(1, sum([batch.urgency <= urgency for batch in self.unwritten.values()]))

    def look(self, info: TcpInfo) -> int:
        """Looks in a row that found nothing left to send or to arrive, and no acknowledgement of it."""
        waits = bool(self.unacked) and not self.unwritten and not info.unsent and not info.unacked
        self.unanswered = self.unanswered + 1 if waits else 0
        return self.unanswered

    def carries(self, xfer: str) -> bool:
        """Whether batches of this transfer are under way on it."""
        return any(batch.xfer == xfer for batch in self.unacked.values())


class TcpLanes:
    """`Lanes` over TCP connections, each made again when it breaks."""

    transport: Transport = "tcp"

    def __init__(
        self,
        settings: TcpSettings,
        tls: ssl.SSLContext,
        depot: str,
        arena: memoryview,
        encoder: RunEncoder,
        owner: LaneOwner,
    ) -> None:
        """`depot` is our own name. Needs a running event loop."""
        self._settings, self._tls, self._depot, self._arena, self._encoder = settings, tls, depot, arena, encoder
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(owner.lanes_ready)
        self._callbacks = bulk_sender.Callbacks(self._mailbox.post, self._on_open, self._on_written, self._on_broken)
        self._lanes: dict[BulkSender, Lane] = {}
        self._senders: list[BulkSender] = []
        self._secrets: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # for connections in clear
        self._rate = 0.0  # of the line
        self._watch = asyncio.create_task(self._watch_connections())

    @property
    def path(self) -> str:
        """See Lanes."""
        return "tcp" if self._settings.encryption == "tls" else "tcp in clear"

    async def prepare(self, far: FarEndpoint) -> None:
        """See Lanes. Connections are made once the link is up."""

    def open(self) -> None:
        """See Lanes."""
        self._senders = [sender for sender in self._senders if sender.thread.is_alive()]
        for _ in range(self._settings.connections):
            sender = BulkSender(self._settings.depot, self._dial, self._arena, self._encoder, self._callbacks)
            self._lanes[sender] = Lane()
            self._senders.append(sender)

    def close(self) -> None:
        """See Lanes."""
        for sender, lane in list(self._lanes.items()):
            lane.batches, lane.closing = None, True
            sender.stop()
            if not lane.unwritten:
                self._forget(sender, lane)
        self._secrets = queue.SimpleQueue()  # those that are left are worth nothing any more

    def room(self, xfer: str, urgency: int) -> bool:
        """See Lanes."""
        return self._choose(xfer, urgency) is not None

    def put(self, batch: FlyingBatch) -> None:
        """See Lanes."""
        lane = self._choose(batch.xfer, batch.urgency)
        assert lane is not None
        self._put_on(lane, batch)

    def _put_on(self, lane: Lane, batch: FlyingBatch) -> None:
        assert lane.batches is not None
        lane.unwritten[batch.header.batch] = lane.unacked[batch.header.batch] = batch
        lane.batches.put(batch)

    def acked(self, number: int) -> FlyingBatch | None:
        """See Lanes."""
        for lane in self._lanes.values():
            if (batch := lane.unacked.pop(number, None)) is not None:
                lane.used, lane.unanswered = self._loop.time(), 0
                return batch
        return None

    def revoke(self, grants: Sequence[int]) -> None:
        """See Lanes. Whoever receives over connections grants nothing."""

    def on_secrets(self, secrets: Sequence[bytes]) -> None:
        """See Lanes."""
        for secret in secrets:
            self._secrets.put(secret)

    def warm(self, round_trip_bytes: float, padding: Callable[[int], FlyingBatch]) -> list[FlyingBatch]:
        """See Lanes."""
        share = int(round_trip_bytes / self._settings.connections)
        if share < MIN_WARM:
            return []
        batches = []
        for sender, info in self._connections():
            lane = self._lanes[sender]
            idle = not lane.unacked and self._loop.time() - lane.used > COLD_SECONDS
            if idle and info.cwnd_bytes < share / 2:
                lane.used = self._loop.time()
                batches.append(padding(min(share, MAX_WARM)))
                self._put_on(lane, batches[-1])
        return batches

    def use(self) -> LaneUse:
        """See Lanes."""
        lanes = [lane for lane in self._lanes.values() if lane.batches is not None]
        infos = tuple(info for _, info in self._connections())
        return LaneUse(len(lanes), sum(bool(lane.unacked) for lane in lanes), infos)

    def adapt(self, rate: float) -> None:
        """See Lanes."""
        if abs(rate - self._rate) > 0.1 * self._rate:
            self._rate = rate
            for sender in self._lanes:
                if (sock := sender.sock) is not None:
                    set_unsent(sock, rate / self._settings.connections)

    async def aclose(self) -> None:
        """See Lanes."""
        self._watch.cancel()
        for sender in self._senders:
            await join_thread(sender.thread, CONNECT_SECONDS)

    def _dial(self) -> Writer:
        """In a bulk connection's thread."""
        settings, secret = self._settings, self._secret()
        sock = dial_bulk(settings.address, self._tls, settings.depot) if not secret else dial_clear(settings.address)
        try:
            set_congestion(sock, settings.congestion)
            set_unsent(sock, self._rate / settings.connections)
            if settings.pace is not None:
                set_pace(sock, settings.pace)
            # The tag of a frame proves nothing before the other side has the secret.
            sock.sendall(wire.frame(link.BulkHello(depot=self._depot, secret=secret)))
        except OSError:
            sock.close()
            raise
        return TlsWriter(sock) if isinstance(sock, ssl.SSLSocket) else PlainWriter(sock, secret)

    def _secret(self) -> bytes:
        """What opens a connection in clear; nothing is needed for one with TLS. Raises OSError."""
        if self._settings.encryption == "tls":
            return b""
        self._mailbox.post(self._owner.send, link.AskSecrets(1))
        try:
            return self._secrets.get(timeout=CONNECT_SECONDS)
        except queue.Empty:
            raise TimeoutError("the far depot gives no secret") from None

    async def _watch_connections(self) -> None:
        """Breaks connections that the far end has ended, or on which it answers no more: what it has not read must go
        over another one, though there may be nothing more to write that would show it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for sender, info in list(self._connections()):
                if not info.alive:
                    sender.interrupt()
                elif self._lanes[sender].look(info) == UNANSWERED_LOOKS:
                    logger.warning("bulk connection to %s: what arrived is not acknowledged", self._settings.depot)
                    sender.interrupt()

    def _connections(self) -> Iterator[tuple[BulkSender, TcpInfo]]:
        for sender, lane in self._lanes.items():
            sock = sender.sock if lane.batches is not None else None
            info = tcp_info(sock) if sock is not None else None
            if info is not None:
                yield sender, info

    def _choose(self, xfer: str, urgency: int) -> Lane | None:
        """The lane on which a batch would be sent first, None when it would wait too long on all."""
        lanes = [lane for lane in self._lanes.values() if lane.batches is not None]
        if most := self._settings.per_transfer:
            own = [lane for lane in lanes if lane.carries(xfer)]
            lanes = own + ([lane for lane in lanes if not lane.unacked] if len(own) < most else [])
        best, least = None, BATCHES_AHEAD
        for lane in lanes:
            if (load := lane.load(urgency)) < least and len(lane.unwritten) < BATCHES_AHEAD + URGENCIES:
                best, least = lane, load
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
