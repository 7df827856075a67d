"""Where bulk connections put what they receive: the only state that their threads share with the hub's thread.

A part is written by one thread at most: a thread claims parts before it reads them from its connection. What it may
not claim it reads into a scratch buffer and forgets.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdrelay.depot import link_messages as link
from pdrelay.depot.base import Fidelity
from pdrelay.depot.checksums import checksum, unpack_checksums, wrong_parts
from pdrelay.depot.page import Page
from pdrelay.depot.payload import LinkCodecs, ReadInto, RunDecoder
from pdrelay.errors import ProtocolError


@dataclass(slots=True, eq=False)
class Slot:
    """A page that is being received. Fields are under the inbox's lock."""

    page: Page
    sender: str = ""  # the depot that is to send it; epochs of others mean nothing here
    grant: int = 0  # that the sender writes the page under itself; 0 when connections bring it
    epoch: int = 0  # the sender's production that the claimed parts belong to
    claimed: int = 0  # bitmap of parts that are here or that a thread is writing
    users: int = 0  # runs that were claimed and have not been reported yet
    closed: bool = False


class Landed(NamedTuple):
    """What became of one run; `good` and `again` are bitmaps, parts in neither were not needed."""

    slot: Slot
    epoch: int
    first: int
    checksums: array[int]  # of the parts as they are here
    good: int
    corrupt: int  # their checksum is wrong
    again: int  # not received, ask again
    inexact: int = 0  # not what their producer wrote, any more
    fidelity: Fidelity = ""  # of those


class Claimed(NamedTuple):
    """What a thread may write of a run."""

    slot: Slot
    fresh: int  # bitmap of the parts to write
    refused: int  # ... and of those to ask for again


class Filled(NamedTuple):
    """What was written of a run; bitmaps."""

    changed: int  # by a lossy codec
    corrupt: int


_CACHED = 256 << 10
"""Bytes that are surely in a core's cache right after they were written."""


class Inbox:
    """Slots by page name."""

    def __init__(self, arena: memoryview, codecs: LinkCodecs) -> None:
        self._arena, self._codecs = arena, codecs
        self._lock = threading.Lock()
        self._slots: dict[bytes, Slot] = {}

    # The hub's thread

    def open(self, page: Page, sender: str) -> Slot:
        """Lets parts of `page` in that come from depot `sender`."""
        slot = Slot(page, sender)
        with self._lock:
            self._slots[page.name] = slot
        return slot

    def grant(self, slot: Slot, number: int) -> None:
        """The sender writes the page itself from now on, under this grant."""
        with self._lock:
            slot.grant = number

    def close(self, slot: Slot) -> bool:
        """Lets nothing more in; whether no thread writes to the page any more."""
        with self._lock:
            del self._slots[slot.page.name]
            slot.closed = True
            return slot.users == 0

    def report(self, landed: Landed) -> bool:
        """A run was dealt with; whether that was the last one of a closed slot."""
        slot = landed.slot
        with self._lock:
            slot.users -= 1
            if landed.epoch == slot.epoch:
                slot.claimed &= ~(landed.corrupt | landed.again)
            return slot.closed and slot.users == 0

    # A connection's thread

    def receive(self, sender: str, run: link.Run, read_into: ReadInto, landed: list[Landed]) -> None:
        """Reads the payload of `run`, verifies it and appends what became of it. Raises OSError, ProtocolError."""
        decoder = self._codecs.decoder(sender)
        decoder.require_own(run)
        claimed = self._claim(sender, run)
        if claimed is None:
            decoder.discard(run, read_into)
            return
        if run.encoding is None and claimed.fresh == run.bits:
            self._take_in(claimed, run, lambda: self._read_checked(claimed, run, read_into, decoder), decoder, landed)
        else:
            self._take_in(claimed, run, lambda: self._read(claimed, run, read_into, decoder), decoder, landed)

    def check(self, sender: str, run: link.Run, landed: list[Landed]) -> None:
        """The same for a run whose parts the sender has written into the page itself. Raises ProtocolError."""
        decoder = self._codecs.decoder(sender)
        decoder.require_own(run)
        claimed = self._claim(sender, run)
        if claimed is not None:
            self._take_in(claimed, run, lambda: self._read(claimed, run, _stay, decoder), decoder, landed)

    def _take_in(
        self, claimed: Claimed, run: link.Run, fill: Callable[[], Filled], decoder: RunDecoder, landed: list[Landed]
    ) -> None:
        slot, fresh, refused = claimed
        checksums = unpack_checksums(run.checksums)
        good = corrupt = inexact = 0
        broken = True
        try:
            changed, corrupt = fill()
            broken = False
            good = fresh & ~corrupt
            inexact = good if run.fidelity else good & changed
            self._renew(slot, run, good & changed, checksums)
        finally:
            again = refused | (fresh if broken else 0)
            fidelity: Fidelity = run.fidelity or decoder.fidelity
            landed.append(Landed(slot, run.epoch, run.first, checksums, good, corrupt, again, inexact, fidelity))

    def _read_checked(self, claimed: Claimed, run: link.Run, read_into: ReadInto, decoder: RunDecoder) -> Filled:
        """Reads a run of parts as they are, all of them fresh. Each piece is checked while the cache holds it."""
        page, checksums = self._view(claimed.slot, run), unpack_checksums(run.checksums)
        corrupt, step = 0, max(1, _CACHED // run.part_bytes)
        for part in range(0, run.parts, step):
            piece = page[part * run.part_bytes : (part + step) * run.part_bytes]
            read_into(piece)
            corrupt |= wrong_parts(piece, checksums[part : part + step]) << part
        decoder.count(run)
        return Filled(0, corrupt << run.first)

    def _read(self, claimed: Claimed, run: link.Run, read_into: ReadInto, decoder: RunDecoder) -> Filled:
        """Reads the whole run, and writes those of its parts to the page that are fresh."""
        slot, fresh, _ = claimed
        page, shape = self._view(slot, run), slot.page.layout.shape
        if fresh == run.bits or read_into is _stay:
            changed = decoder.read(run, page, read_into, shape)
        else:
            aside = memoryview(bytearray(run.payload))
            changed = decoder.read(run, aside, read_into, shape)
            for first, parts in runs_of_bits(fresh):
                at, size = (first - run.first) * run.part_bytes, parts * run.part_bytes
                page[at : at + size] = aside[at : at + size]
        if changed is None:
            return Filled(0, fresh)
        exact = fresh >> run.first & ~changed
        return Filled(changed << run.first, wrong_parts(page, unpack_checksums(run.checksums), exact) << run.first)

    def _view(self, slot: Slot, run: link.Run) -> memoryview:
        start = slot.page.offset + run.first * run.part_bytes
        return self._arena[start : start + run.payload]

    def _claim(self, sender: str, run: link.Run) -> Claimed | None:
        """What the caller shall write; None for a run that nobody needs."""
        bits = run.bits
        with self._lock:
            slot = self._slots.get(run.name)
            if slot is None or (slot.sender, slot.grant) != (sender, run.grant):  # late, of a transfer that has ended
                return None
            layout = slot.page.layout
            if run.part_bytes != layout.part_bytes or run.first + run.parts > layout.parts:
                raise ProtocolError(f"parts of {run.part_bytes} bytes up to {run.first + run.parts} for {layout}")
            if run.epoch < slot.epoch:
                return None
            refused = 0
            if run.epoch > slot.epoch:
                if slot.users:  # another thread still writes the former production: INV-DEPOT-6
                    refused, bits = bits, 0
                else:
                    slot.epoch, slot.claimed = run.epoch, 0
            fresh = bits & ~slot.claimed
            slot.claimed |= fresh
            slot.users += 1
            return Claimed(slot, fresh, refused)

    def _renew(self, slot: Slot, run: link.Run, changed: int, checksums: array[int]) -> None:
        """Parts that a lossy codec `changed` have checksums of their own from here on."""
        if not changed:
            return
        for at in range(run.first, run.first + run.parts):
            if changed >> at & 1:
                checksums[at - run.first] = self._checksum(slot, run, at)

    def _checksum(self, slot: Slot, run: link.Run, part: int) -> int:
        start = slot.page.offset + part * run.part_bytes
        return checksum(self._arena[start : start + run.part_bytes])


def _stay(view: memoryview) -> None:
    """Reads what is in place already."""


def runs_of_bits(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of set bits as (start, length)."""
    at = 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        length = (~bits & bits + 1).bit_length() - 1
        yield at + skipped, length
        bits >>= length
        at += skipped + length
