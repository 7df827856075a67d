"""A link between two in-memory depots: at once, or one message at a time as a test says."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from pdrelay.depot import link_messages as messages
from pdrelay.depot.base import LinkState
from pdrelay.depot.codec.base import WireCodec
from pdrelay.depot.inbox import Landed
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.payload import RunDecoder, RunEncoder, encoded
from pdrelay.depot.schedule import Schedule, Srpt
from pdrelay.errors import ContractError

if TYPE_CHECKING:
    from pdrelay.depot.memory import MemoryDepot

BATCH_BYTES = 1 << 20


def link(
    source: MemoryDepot,
    target: MemoryDepot,
    *,
    stepped: bool = False,
    batch_bytes: int = BATCH_BYTES,
    codec: WireCodec | None = None,
) -> MemoryLink:
    """Joins two depots so that `source` can transfer to `target`.

    What is under way moves after each call on either depot; when `stepped`, only with `MemoryLink.step`.
    """
    target.lock = source.lock  # one lock for both: each side's calls reach into the other
    source.hub.codecs.encoders[target.hub.name] = RunEncoder(codec)
    target.hub.codecs.decoders[source.hub.name] = RunDecoder(codec)
    made = MemoryLink(source, target, stepped, batch_bytes)
    with source.turn():
        source.links.append(made)
        target.links.append(made)
        source.hub.senders.peers[target.hub.name] = made
        made.connect()
    return made


class MemoryLink:
    """A `Peer` of the source. Payload moves by `deliver_batch`, messages by `deliver_message`, both in order."""

    def __init__(self, source: MemoryDepot, target: MemoryDepot, stepped: bool, batch_bytes: int) -> None:
        self.source, self.target, self.stepped, self.batch_bytes = source, target, stepped, batch_bytes
        self.up = False
        self.rate, self.rtt = 1e9, 0.0
        self.schedule: Schedule = Srpt()
        self.corrupt_next = 0  # so many parts from now on arrive with a wrong byte
        self._forth: deque[messages.LinkMessage] = deque()
        self._back: deque[messages.LinkMessage] = deque()

    def connect(self) -> None:
        """The line is up (again)."""
        source, target = self.source.hub, self.target.hub
        try:
            target.codecs.decoder(source.name).require_fit(source.own_contracts)
            source.codecs.encoder(target.name).require_fit(target.own_contracts)
            target.peer_contracts(f"peer:{source.name}", source.own_contracts)
            source.peer_contracts(f"peer:{target.name}", target.own_contracts)
        except ContractError as error:
            source.links.state(LinkState(target.name, False, str(error)))
            return
        self.up = True
        source.on_contracts[id(self)] = lambda: self.send(messages.Contracts(source.own_contracts))
        target.receivers.peer_up(source.name, self._back.append)
        source.senders.link_up(target.name)
        source.links.state(LinkState(target.name, True))

    def cut(self) -> None:
        """The line breaks; everything under way is lost."""
        with self.source.turn():
            self.up = False
            self._forth.clear()
            self._back.clear()
            source, target = self.source.hub, self.target.hub
            source.on_contracts.pop(id(self), None)
            source.senders.link_down(target.name, source.clock())
            target.receivers.peer_down(source.name, target.clock())
            target.settle()
            source.links.state(LinkState(target.name, False, "cut"))

    def mend(self) -> None:
        """The line comes back."""
        with self.source.turn():
            self.connect()

    def send(self, message: messages.LinkMessage) -> None:
        """See Peer."""
        if self.up:
            self._forth.append(message)

    def wake(self) -> None:
        """See Peer. Batches are taken when the link moves."""

    def prepare(self) -> None:
        """See Peer. Nothing gets cold."""

    def step(self) -> bool:
        """Moves one message or batch; False when there is nothing."""
        with self.source.lock:
            return self.deliver_message() or self.deliver_batch()

    def move(self) -> None:
        """Moves everything, unless the link is stepped."""
        while not self.stepped and self.step():
            pass

    def deliver_message(self) -> bool:
        """Moves one message, forth before back."""
        if self._forth:
            self.arrive_forth(self._forth.popleft())
        elif self._back:
            self.arrive_back(self._back.popleft())
        else:
            return False
        return True

    def arrive_forth(self, message: messages.LinkMessage) -> None:
        """The target reads a message of the source."""
        source, target = self.source.hub, self.target.hub
        if isinstance(message, messages.Contracts):
            with suppress(ContractError):
                target.peer_contracts(f"peer:{source.name}", message.contracts)
        else:
            target.receivers.on_message(source.name, message)
        target.settle()

    def arrive_back(self, message: messages.LinkMessage) -> None:
        """The source reads a message of the target."""
        self.source.hub.senders.on_message(self.target.hub.name, message)
        self.source.hub.settle()

    def deliver_batch(self) -> bool:
        """Moves one batch of parts."""
        source, target = self.source.hub, self.target.hub
        batch = self._next_batch() if self.up else None
        if batch is None:
            return False
        landed = self._copy(batch)
        source.senders.outbox.written(batch)
        source.senders.outbox.acknowledged(batch)
        target.receivers.landed(landed)
        target.settle()
        source.settle()
        return True

    def _next_batch(self) -> FlyingBatch | None:
        hub = self.source.hub
        return hub.senders.next_batch(self.target.hub.name, self.batch_bytes, hub.clock())

    def _copy(self, batch: FlyingBatch) -> list[Landed]:
        landed: list[Landed] = []
        header, payloads = encoded(batch, self.source.arena, self.source.hub.codecs.encoder(self.target.hub.name))
        for run, data in zip(header.runs, payloads, strict=True):
            payload = bytearray(data)
            if self.corrupt_next:
                self.corrupt_next -= 1
                payload[0] ^= 0xFF
            self.target.hub.inbox.receive(self.source.hub.name, run, Source(payload).read_into, landed)
        return landed


class Source:
    """Bytes to read from, in order."""

    def __init__(self, data: bytearray) -> None:
        self._data, self._at = data, 0

    def read_into(self, view: memoryview) -> None:
        """Fills `view` with the next bytes."""
        view[:] = self._data[self._at : self._at + len(view)]
        self._at += len(view)
