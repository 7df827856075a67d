"""What bulk connections shall send next, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay.depot import link_messages as link
from pdrelay.depot.base import Transfer, TransferStats
from pdrelay.depot.checksums import pack_checksums
from pdrelay.depot.grants import NOWHERE, Place
from pdrelay.depot.index import Index
from pdrelay.depot.page import Page


@dataclass(slots=True)
class Wanted:
    """A page that the other side waits for."""

    epoch: int
    missing: int  # bitmap of parts that are not known to have arrived
    flying: int = 0  # ... and of those that are under way
    place: Place = NOWHERE  # where to write it ourselves
    size: int = 0  # bytes of the missing parts, as far as they are known


@dataclass(slots=True, eq=False)
class Sending:
    """One transfer."""

    transfer: Transfer
    names: list[bytes]
    client: str
    started: float
    demoted: bool = False
    produced: bool = False  # see Transfer; only until it has been told as stalled
    have: int | None = None
    saved: int = 0
    total: int = 0  # bytes of all names, as far as their layout is known
    sent: int = 0
    wire: int = 0
    pages: int = 0
    delivered: bool = False
    remaining: int = 0  # bytes of wanted parts that are not known to have arrived
    turn: float = 0.0  # see schedule.Flow
    wanted: dict[bytes, Wanted] = field(default_factory=dict)
    ready: dict[bytes, None] = field(default_factory=dict)  # wanted pages that have parts to send
    absent: set[bytes] = field(default_factory=set)  # names with neither copy nor writer
    pinned: bool = False
    told_whole: bool = False  # the receiver knows that none is absent
    absent_since: dict[bytes, float] = field(default_factory=dict)
    link_lost: float | None = None
    sent_before: int = -1  # `sent` at the last look ...
    moved: float = 0.0  # ... and when it last differed

    @property
    def owner(self) -> str:
        """Its name in the index."""
        return f"out:{self.transfer.xfer}"

    @property
    def background(self) -> bool:
        """Whether nobody waits for it."""
        return self.demoted or self.transfer.background

    def want(self, name: bytes, wanted: Wanted) -> None:
        """The other side waits for this page, as of now."""
        self.forget(name)
        self.wanted[name] = wanted

    def forget(self, name: bytes) -> None:
        """The other side does not wait for this page."""
        self.ready.pop(name, None)
        if (wanted := self.wanted.pop(name, None)) is not None:
            self.remaining -= wanted.size

    def forget_all(self) -> None:
        """What the other side waits for will be told anew."""
        self.wanted.clear()
        self.ready.clear()
        self.remaining = 0

    def measure(self, wanted: Wanted, part_bytes: int) -> None:
        """Follows a change of what is missing of a wanted page."""
        size = wanted.missing.bit_count() * part_bytes if wanted.missing > 0 else 0
        self.remaining += size - wanted.size
        wanted.size = size

    @property
    def stats(self) -> TransferStats:
        """What it cost so far."""
        return TransferStats(
            sent=self.sent, wire=self.wire, saved=self.saved, pages=self.pages, delivered=self.delivered
        )


class FlyingRun(NamedTuple):
    """Some parts of one page on their way."""

    sending: Sending
    page: Page
    wanted: Wanted
    epoch: int
    first: int
    parts: int

    @property
    def bits(self) -> int:
        """Bitmap of the parts."""
        return ((1 << self.parts) - 1) << self.first


class FlyingBatch(NamedTuple):
    """One batch on its way. Its pages are held until `written`."""

    header: link.Batch
    runs: list[FlyingRun]
    wire: list[int]  # bytes that each run takes on the line; a codec lowers them before it sends
    urgency: int  # 0: all that is left of live transfers; 1: part of one; 2: background

    @property
    def xfer(self) -> str:
        """The transfer, the first when there are several; empty for padding."""
        return self.runs[0].sending.transfer.xfer if self.runs else ""

    @property
    def payload(self) -> int:
        """Bytes of all parts."""
        return sum(run.payload for run in self.header.runs)

    @property
    def line_bytes(self) -> int:
        """Bytes that it takes on the line; before it is encoded, those of its parts."""
        return sum(self.wire) + self.header.padding


SCRAP = 4
"""The last quarter of a batch that holds whole pages stays empty rather than that a page is cut for it: each run costs
both ends as much, whatever its size."""


class Outbox:
    """Cuts wanted pages into batches."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.sent_bytes = 0
        self.sent_wire_bytes = 0
        self.spent: dict[str, list[int]] = {}  # by depot: grants that are of no use for what we have now
        self._batches = 0

    def line_up(self, sending: Sending, page: Page) -> None:
        """Makes the page ready to send when it has parts that are wanted and not under way."""
        wanted = sending.wanted.get(page.name)
        if wanted is None:
            return
        if wanted.epoch != page.epoch:  # another production than the one that was partly sent
            if wanted.epoch and wanted.place.grant:  # INV-NIXL-3: its parts must not land among the others
                if wanted.missing:
                    self._give_back(sending, page.name, wanted.place.grant)
                return
            wanted.epoch, wanted.missing, wanted.flying = page.epoch, -1, 0
        if wanted.missing < 0:
            wanted.missing &= (1 << page.layout.parts) - 1
        sending.measure(wanted, page.layout.part_bytes)
        if not page.dropped and _ready(page, wanted):
            sending.ready[page.name] = None

    def _give_back(self, sending: Sending, name: bytes, grant: int) -> None:
        """The page is wanted no more, until the receiver gives other room for it."""
        sending.forget(name)
        assert sending.transfer.to is not None
        self.spent.setdefault(sending.transfer.to, []).append(grant)

    def ready_bytes(self, sending: Sending) -> int:
        """About so much of it can be sent now: of each ready page as much as of the last, which nothing has begun."""
        name = next(reversed(sending.ready), None)
        page = self._index.get(name) if name is not None else None
        if page is None:
            return 0
        ready = _ready(page, sending.wanted[page.name])
        return len(sending.ready) * ready.bit_count() * page.layout.part_bytes

    def next_batch(self, sendings: Sequence[Sending], max_bytes: int, urgency: int) -> FlyingBatch | None:
        """About `max_bytes` of what is ready, the first of `sendings` first; None when there is nothing.

        The pages are held until `written`.
        """
        runs: list[FlyingRun] = []
        room = max_bytes
        for sending in sendings:
            while room > 0 and sending.ready:
                name = next(iter(sending.ready))
                taken = self._take(sending, name, room, max_bytes, runs)
                if not taken and name in sending.ready:
                    break
                room -= taken
        if not runs:
            return None
        self._batches += 1
        header = link.Batch(self._batches, [_described(run) for run in runs])
        return FlyingBatch(header, runs, [run.payload for run in header.runs], urgency)

    def padding(self, size: int) -> FlyingBatch:
        """A batch of bytes for nobody."""
        self._batches += 1
        return FlyingBatch(link.Batch(self._batches, [], size), [], [], urgency=2)

    def written(self, batch: FlyingBatch) -> None:
        """The bytes have been read from the arena (or never will be)."""
        for run in batch.runs:
            self._index.unhold(run.page)

    def acknowledged(self, batch: FlyingBatch) -> None:
        """The other side has read the batch; what arrived broken it wants again."""
        for run, wanted in self._landed(batch):
            wanted.missing &= ~run.bits
            run.sending.measure(wanted, run.page.layout.part_bytes)
            if run.page.complete and wanted.missing == 0:
                run.sending.pages += 1
        for run, wire in zip(batch.runs, batch.wire, strict=True):
            payload = run.parts * run.page.layout.part_bytes
            run.sending.sent += payload
            run.sending.wire += wire
            self.sent_bytes += payload
            self.sent_wire_bytes += wire

    def failed(self, batch: FlyingBatch) -> None:
        """The connection broke: what was under way on it must be sent again."""
        for run, _ in self._landed(batch):
            self.line_up(run.sending, run.page)

    def _landed(self, batch: FlyingBatch) -> Iterable[tuple[FlyingRun, Wanted]]:
        for run in batch.runs:
            wanted = run.sending.wanted.get(run.page.name)
            if wanted is run.wanted and wanted.epoch == run.epoch:
                wanted.flying &= ~run.bits
                yield run, wanted

    def _take(self, sending: Sending, name: bytes, room: int, most: int, runs: list[FlyingRun]) -> int:
        """Adds what is ready of one page, about `room` bytes of it, to a batch of `most` bytes; the bytes taken."""
        page, wanted = self._index.get(name), sending.wanted[name]
        assert page is not None, "INV-DEPOT-5: what is ready to send is in the arena"
        taken, scrap = 0, most // SCRAP if page.layout.page_bytes <= most else 0
        ready = _ready(page, wanted)
        while ready and taken < room:
            first = (ready & -ready).bit_length() - 1
            length = (~(ready >> first) & (ready >> first) + 1).bit_length() - 1
            count = min(length, max(1, (room - taken) // page.layout.part_bytes))
            if count < length and runs and room - taken <= scrap:
                break
            run = FlyingRun(sending, page, wanted, page.epoch, first, count)
            self._index.hold(page)
            runs.append(run)
            wanted.flying |= run.bits
            ready &= ~run.bits
            taken += count * page.layout.part_bytes
        if not ready:
            del sending.ready[name]
        return taken


def _ready(page: Page, wanted: Wanted) -> int:
    """Bitmap of the parts to send."""
    return wanted.missing & ~wanted.flying & page.have


def _described(run: FlyingRun) -> link.Run:
    page, grant = run.page, run.wanted.place.grant
    checksums = pack_checksums(page.checksums[run.first : run.first + run.parts])
    size, fidelity = page.layout.part_bytes, page.fidelity
    return link.Run(page.name, run.epoch, run.first, size, checksums, fidelity, grant=grant)
