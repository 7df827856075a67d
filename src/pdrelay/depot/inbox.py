"""Where bulk connections put what they receive: the only state that their threads share with the hub's thread.

A part is written by one thread at most: a thread claims parts before it reads them from its connection. What it may
not claim it reads into a scratch buffer and forgets.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pdrelay.depot import link_messages as link
from pdrelay.depot.index import Page
from pdrelay.errors import ProtocolError

ReadInto = Callable[[memoryview], None]
"""Fills the whole view from a connection. Raises OSError when it breaks."""


@dataclass(slots=True, eq=False)
class Slot:
    """A page that is being received. Fields are under the inbox's lock."""

    page: Page
    sender: str = ""  # the depot that is to send it; epochs of others mean nothing here
    epoch: int = 0  # the sender's production that the claimed parts belong to
    claimed: int = 0  # bitmap of parts that are here or that a thread is writing
    users: int = 0  # runs that were claimed and have not been reported yet
    closed: bool = False


class Landed(NamedTuple):
    """What became of one run; `good` and `again` are bitmaps, parts in neither were not needed."""

    slot: Slot
    epoch: int
    first: int
    checksums: array[int]
    good: int
    corrupt: int  # their checksum is wrong
    again: int  # not received, ask again


class Inbox:
    """Slots by page name."""

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._slots: dict[bytes, Slot] = {}

    # The hub's thread

    def open(self, page: Page, sender: str) -> Slot:
        """Lets parts of `page` in that come from depot `sender`."""
        slot = Slot(page, sender)
        with self._lock:
            self._slots[page.name] = slot
        return slot

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
        slot, fresh, refused = self._claim(sender, run)
        if slot is None:
            _discard(run.payload, read_into)
            return
        checksums = link.unpack_checksums(run.checksums)
        good = corrupt = 0
        broken = True
        try:
            for first, parts in runs_of_bits(fresh, run.first, run.parts):
                wanted = bool(fresh >> first & 1)
                if not wanted:
                    _discard(parts * run.part_bytes, read_into)
                    continue
                at = slot.page.offset + first * run.part_bytes
                read_into(self._arena[at : at + parts * run.part_bytes])
                bad = self._verify(at, run, first, parts, checksums)
                corrupt |= bad
                good |= ((1 << parts) - 1) << first & ~bad
            broken = False
        finally:
            again = refused | (fresh & ~good & ~corrupt if broken else 0)
            landed.append(Landed(slot, run.epoch, run.first, checksums, good, corrupt, again))

    def _claim(self, sender: str, run: link.Run) -> tuple[Slot | None, int, int]:
        """The slot, the parts that the caller shall write, and those that it must ask for again."""
        bits = ((1 << run.parts) - 1) << run.first
        with self._lock:
            slot = self._slots.get(run.name)
            if slot is None or slot.sender != sender:  # late parts of a transfer that has ended
                return None, 0, 0
            layout = slot.page.layout
            if run.part_bytes != layout.part_bytes or run.first + run.parts > layout.parts:
                raise ProtocolError(f"parts of {run.part_bytes} bytes up to {run.first + run.parts} for {layout}")
            if run.epoch < slot.epoch:
                return None, 0, 0
            refused = 0
            if run.epoch > slot.epoch:
                if slot.users:  # another thread still writes the former production: INV-DEPOT-6
                    refused, bits = bits, 0
                else:
                    slot.epoch, slot.claimed = run.epoch, 0
            fresh = bits & ~slot.claimed
            slot.claimed |= fresh
            slot.users += 1
            return slot, fresh, refused

    def _verify(self, at: int, run: link.Run, first: int, parts: int, checksums: array[int]) -> int:
        bad = 0
        for part in range(parts):
            start = at + part * run.part_bytes
            found = xxh3_64_intdigest(self._arena[start : start + run.part_bytes])
            if found != checksums[first - run.first + part]:
                bad |= 1 << (first + part)
        return bad


def runs_of_bits(bits: int, first: int, count: int) -> list[tuple[int, int]]:
    """Cuts the bits from `first` on into (start, length) runs of equal value."""
    runs: list[tuple[int, int]] = []
    for at in range(first, first + count):
        if runs and (bits >> at & 1) == (bits >> (at - 1) & 1):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
    return runs


_SCRATCH = 1 << 18


def _discard(size: int, read_into: ReadInto) -> None:
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        take = min(size, _SCRATCH)
        read_into(scratch[:take])
        size -= take
