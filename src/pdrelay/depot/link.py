"""The link from this depot to another: the conversation on its control connection, and what its lanes shall carry."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdrelay.cluster.topology import Encryption, ScheduleName
from pdrelay.depot import link_messages as messages
from pdrelay.depot import wire
from pdrelay.depot.base import LinkEstimate, LinkState
from pdrelay.depot.bulk_sender import MAX_BACKOFF, MIN_BACKOFF
from pdrelay.depot.connection import MAX_UNSENT
from pdrelay.depot.flow_control import FlowControl
from pdrelay.depot.handshake import Terms, check_hello, hello_of
from pdrelay.depot.hub import Hub
from pdrelay.depot.keepalive import KeepAlive
from pdrelay.depot.lanes import LaneOwner, Lanes
from pdrelay.depot.line_estimate import LineEstimate
from pdrelay.depot.link_monitor import LOOK_SECONDS, LOOKS, LinkMonitor
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.schedule import SCHEDULES, Schedule
from pdrelay.depot.sockets import CONNECT_SECONDS, dial_control, read_frame
from pdrelay.depot.tcp_lanes import TcpLanes, TcpSettings
from pdrelay.errors import PdrelayError

logger = logging.getLogger(__name__)

ENDPOINT_SECONDS = 60.0
"""For the far depot's NIXL agent: a large arena takes its time to be registered."""


class Route(NamedTuple):
    """How to reach another depot."""

    depot: str
    control: str  # address
    bulk: str  # address
    connections: int
    rate: float | None  # bytes per second; None: as fast as the line carries
    rtt: float  # seconds
    schedule: ScheduleName = "srpt"
    per_transfer: int = 0  # connections that one transfer may use; 0: all
    congestion: str = ""  # TCP's; empty: the kernel's default
    encryption: Encryption = "tls"


MakeLanes = Callable[[LaneOwner], Lanes]


class DepotLink:
    """A `Peer` over sockets. All methods run on the event loop."""

    def __init__(self, hub: Hub, route: Route, tls: ssl.SSLContext, make_lanes: MakeLanes | None = None) -> None:
        """`make_lanes` replaces the TCP connections of `route` by another path for payload."""
        self._hub, self._route, self._tls = hub, route, tls
        self._encoder = hub.codecs.encoder(route.depot)
        self._writer: asyncio.StreamWriter | None = None
        self._lanes = make_lanes(self) if make_lanes is not None else self._tcp_lanes()
        self._line = LineEstimate(route.rate, route.rtt)
        self._flow = FlowControl(self._line, route.connections, route.rate)
        self._monitor = LinkMonitor(route.depot, self._line)
        self._told: LinkEstimate | None = None
        self._terms = Terms(self._encoder.name, self._lanes.transport, route.encryption)
        self._pace_timer: asyncio.TimerHandle | None = None
        self.schedule: Schedule = SCHEDULES[route.schedule]()
        self._abort: Callable[[], None] | None = None  # ends the control connection
        self._trouble = ""  # why we ended it
        self._pings: deque[float] = deque()  # when those left that were not answered yet
        hub.senders.peers[route.depot] = self
        self._task = asyncio.create_task(self._run())

    def _tcp_lanes(self) -> Lanes:
        route = self._route
        settings = TcpSettings(
            route.depot, route.bulk, route.connections, route.per_transfer, route.congestion, route.rate,
            route.encryption,
        )  # fmt: skip
        return TcpLanes(settings, self._tls, self._hub.name, self._hub.arena, self._encoder, self)

    @property
    def up(self) -> bool:
        """See Peer."""
        return self._writer is not None

    @property
    def rate(self) -> float:
        """See Peer."""
        return self._line.rate * self._encoder.ratio

    @property
    def rtt(self) -> float:
        """See Peer."""
        return self._line.rtt

    def send(self, message: messages.LinkMessage) -> None:
        """See Peer."""
        if self._writer is not None:
            self._writer.write(wire.frame(message))
            if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
                self.lanes_broken(f"{self._route.depot} does not read what it is told")

    def prepare(self) -> None:
        """See Peer."""
        round_trip = self._line.rate * self._line.base_rtt
        for batch in self._lanes.warm(round_trip, self._hub.senders.outbox.padding):
            self._flow.sent(batch.header.batch, batch.line_bytes, self._hub.clock())

    def wake(self) -> None:
        """See Peer."""
        if self._writer is not None:
            self._lanes.revoke(self._hub.senders.outbox.spent.pop(self._route.depot, ()))
        now = self._hub.clock()
        while self._writer is not None:
            if not self._flow.room:
                self._note_full(now)
                return
            if (wait := self._flow.wait(now)) > 0:
                self._wake_in(wait)
                return
            ratio = self._encoder.ratio
            usual, urgent = int(self._flow.batch_bytes * ratio), int(self._flow.urgent_bytes * ratio)
            batch = self._hub.senders.next_batch(
                self._route.depot, usual, now, self._lanes.room, self._large_batch, urgent
            )
            if batch is None:
                self._note_full(now)
                return
            self._flow.sent(batch.header.batch, int(batch.payload / self._encoder.ratio), now)
            self._lanes.put(batch)

    def _large_batch(self, ready: int) -> int:
        """Payload of the next batch, when so much is ready. The line carries fewer bytes with a codec."""
        ratio = self._encoder.ratio
        return int(self._flow.large_batch_bytes(int(ready / ratio)) * ratio)

    def _note_full(self, now: float) -> None:
        """The line is what limits us only as long as something is left over."""
        if self._hub.senders.anything_waits(self._route.depot):
            self._line.full(now)
        else:
            self._line.starved()

    def _wake_in(self, seconds: float) -> None:
        if self._pace_timer is None:
            self._pace_timer = asyncio.get_running_loop().call_later(seconds, self._pace_over)

    def _pace_over(self) -> None:
        self._pace_timer = None
        self.wake()

    async def aclose(self) -> None:
        """Ends all connections and waits until nothing touches the arena any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._pace_timer is not None:
            self._pace_timer.cancel()
        await self._lanes.aclose()

    # Control

    async def _run(self) -> None:
        backoff = MIN_BACKOFF
        while True:
            detail = "closed"
            was_up = False
            self._trouble = ""
            try:
                await self._converse()
            except (OSError, PdrelayError, TimeoutError, asyncio.IncompleteReadError) as error:
                detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            except Exception:
                logger.exception("link to depot %s failed", self._route.depot)
                detail = "internal error, see the depot's log"
            finally:
                self._abort = None
                was_up = self._down(self._trouble or detail)
            if was_up:
                logger.warning("link to depot %s is down: %s", self._route.depot, self._trouble or detail)
            backoff = MIN_BACKOFF if was_up else min(backoff * 2, MAX_BACKOFF)
            await asyncio.sleep(backoff)

    async def _converse(self) -> None:
        reader, writer = await dial_control(self._route.control, self._tls, self._route.depot)
        self._abort = writer.transport.abort
        try:
            await self._shake_hands(reader, writer)
            await self._lanes.prepare(lambda: self._endpoint(reader))
            self._open(writer)
            alive = KeepAlive(writer, self._ping)
            await alive.run(self._listen(reader, alive), self._watch())
        finally:
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, alive: KeepAlive) -> None:
        while True:
            message = messages.decode(await read_frame(reader))
            alive.heard()
            self._on_message(message)

    def _ping(self) -> bytes:
        self._pings.append(self._hub.clock())
        return wire.frame(messages.Ping())

    async def _watch(self) -> None:
        """Tells how the link is, about once a second and on change."""
        while True:
            for _ in range(LOOKS):
                self._monitor.look(self._lanes.use())
                self._lanes.adapt(self._line.rate)
                if self._monitor.fresh_lanes:
                    self.prepare()
                await asyncio.sleep(LOOK_SECONDS)
            self.tell_estimate()

    def tell_estimate(self) -> None:
        """Tells the link's estimate to subscribers, unless it is as it was."""
        senders, to = self._hub.senders, self._route.depot
        queued, background = (senders.queued(to, background=background) for background in (False, True))
        estimate = self._monitor.estimate(queued, background, round(self._encoder.ratio, 2))
        if estimate != self._told:
            self._told = estimate
            self._hub.links.estimate(estimate)

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hub = self._hub
        writer.write(wire.frame(hello_of(hub, self._terms)))
        async with asyncio.timeout(CONNECT_SECONDS):
            answer = messages.decode_hello(await read_frame(reader))
        check_hello(hub, answer, self._terms)
        self._encoder.require_fit(answer.contracts)
        hub.peer_contracts(self._holder, answer.contracts)

    async def _endpoint(self, reader: asyncio.StreamReader) -> messages.Endpoint:
        """Where the far depot lets us write. Raises TimeoutError too."""
        async with asyncio.timeout(ENDPOINT_SECONDS):
            while True:
                message = messages.decode(await read_frame(reader))
                if isinstance(message, messages.Endpoint):
                    return message
                if isinstance(message, messages.Contracts):
                    self._hub.peer_contracts(self._holder, message.contracts)
                if isinstance(message, wire.Failure):
                    raise wire.rebuild(message)

    def _open(self, writer: asyncio.StreamWriter) -> None:
        hub, route = self._hub, self._route
        self._writer = writer
        hub.on_contracts[id(self)] = lambda: self.send(messages.Contracts(hub.own_contracts))
        hub.on_contracts[id(self)]()  # an engine may have come since our hello
        self._pings.clear()
        self._lanes.open()
        hub.senders.link_up(route.depot)
        hub.links.state(LinkState(route.depot, True, path=self._lanes.path))
        logger.info("link to depot %s: payload by %s", route.depot, self._lanes.path)
        hub.settle()

    def _down(self, detail: str) -> bool:
        """The control connection is gone; whether it had been up."""
        hub, to = self._hub, self._route.depot
        was_up = self._writer is not None
        self._writer = None
        self._lanes.close()
        self._flow.reset()
        hub.on_contracts.pop(id(self), None)
        hub.contracts.leave(self._holder)
        if was_up:
            hub.senders.link_down(to, hub.clock())
        hub.links.state(LinkState(to, False, detail))
        hub.settle()
        return was_up

    @property
    def _holder(self) -> str:
        return f"peer:{self._route.depot}:out"

    def _on_message(self, message: messages.LinkMessage) -> None:
        if isinstance(message, messages.Ack):
            self._on_acks(message.batches)
        elif isinstance(message, messages.Contracts):
            self._encoder.require_fit(message.contracts)
            self._hub.peer_contracts(self._holder, message.contracts)
        elif isinstance(message, messages.Ping):
            if self._pings:
                now = self._hub.clock()
                self._line.on_ping(now - self._pings.popleft(), now)
        elif isinstance(message, messages.Stats):
            self._monitor.far = message
        elif isinstance(message, messages.Secrets):
            self._lanes.on_secrets(message.secrets)
        elif isinstance(message, wire.Failure):
            raise wire.rebuild(message)
        else:
            self._hub.senders.on_message(self._route.depot, message)
            if isinstance(message, messages.Revoke):
                self._lanes.revoke([grant for _, grant in message.grants])
        self._hub.settle()

    # Bulk

    def _on_acks(self, numbers: Sequence[int]) -> None:
        now = self._hub.clock()
        for number in numbers:
            if (batch := self._lanes.acked(number)) is not None:
                self._flow.acked(number, batch.line_bytes, now)
                self._hub.senders.outbox.acknowledged(batch)
        self.wake()

    def lanes_ready(self) -> None:
        """See LaneOwner."""
        self._hub.settle()
        self.wake()

    def lanes_broken(self, detail: str) -> None:
        """See LaneOwner."""
        self._trouble = detail
        if self._abort is not None:
            self._abort()

    def batch_written(self, batch: FlyingBatch) -> None:
        """See LaneOwner."""
        self._hub.senders.outbox.written(batch)

    def batch_failed(self, batch: FlyingBatch) -> None:
        """See LaneOwner."""
        self._flow.failed(batch.header.batch)
        self._hub.senders.outbox.failed(batch)
