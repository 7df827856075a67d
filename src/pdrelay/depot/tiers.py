"""The disk tier below the arena: prefix pages are written out before they are evicted, and come back when asked for.

A page on disk counts as available. Reading and writing happen in threads; all state is the hub's. Whatever goes wrong
with the disk is a miss: it is counted and logged, and the page is fetched or computed as if it had never been here.

INV-DISK-1: a page counts as written only if it was in the arena, unchanged, until the write ended.
INV-DISK-2: what comes from disk is complete only after every part fitted its checksum.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdrelay.depot.arena import ExtentAllocator, aligned
from pdrelay.depot.base import DiskStats, Fidelity, PageKind
from pdrelay.depot.checksums import wrong_parts
from pdrelay.depot.disk import Disk
from pdrelay.depot.index import Index
from pdrelay.depot.page import Changes, Page
from pdrelay.errors import ArenaFullError
from pdrelay.kv.contract import Layout

logger = logging.getLogger(__name__)

OWNER = "disk"
"""Writer of pages that come back because somebody here asked for them."""

WATERMARK = 0.25
"""While less than this share of the arena is free, pages that may be evicted are written to disk, oldest first."""

MAX_WRITES, MAX_READS = 2, 8
"""Pages under way. Writes leave threads for reads, which somebody waits for."""

MAX_ERRORS = 8
"""So many errors one after the other end the tier."""

STUCK_SECONDS = 10.0
"""A disk that does not answer for so long has vanished."""


@dataclass(slots=True, eq=False)
class Slot:
    """A page on disk."""

    layout: Layout
    checksums: array[int]
    fidelity: Fidelity
    offset: int
    readers: int = 0
    dropped: bool = False


class DiskTier:
    """Pages on `disk`, the least recently used first to go."""

    def __init__(self, index: Index, arena: memoryview, disk: Disk, clock: Callable[[], float]) -> None:
        self._index, self._arena, self._disk, self._clock = index, arena, disk, clock
        self._room = ExtentAllocator(disk.capacity)
        self._slots: OrderedDict[bytes, Slot] = OrderedDict()
        self._unsaved: OrderedDict[bytes, Page] = OrderedDict()  # may be evicted, and are not on disk
        self._wanted: dict[bytes, None] = {}  # asked for, and waiting for room in the arena
        self._began: dict[int, float] = {}  # reads and writes under way
        self._filling: dict[Page, str] = {}  # pages that are being read, and their writers
        self._operations = self._writes = self._errors_in_a_row = 0
        self._removed: list[bytes] = []
        self._written = self._restored = self._evicted = self._corrupt = self._errors = 0
        self.trouble = disk.trouble
        self.after: Callable[[], object] = lambda: (
            None
        )  # called when a read or write has ended: there is news in the index

    # Looking

    @property
    def on(self) -> bool:
        """Whether there is a disk tier."""
        return self._disk.capacity > 0 and not self.trouble

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def holds(self, name: bytes) -> bool:
        """Whether the page is on disk."""
        return name in self._slots

    def available(self, names: Sequence[bytes]) -> int:
        """How many leading `names` are complete in the arena or on disk."""
        for count, name in enumerate(names):
            if not self._index.complete(name) and name not in self._slots:
                return count
        return len(names)

    def stats(self) -> DiskStats:
        """Its counters."""
        return DiskStats(
            state=f"off: {self.trouble}" if self.trouble else "on" if self.on else "none",
            pages=len(self._slots),
            used_bytes=self._room.capacity - self._room.free_bytes,
            capacity_bytes=self._room.capacity,
            written_pages=self._written,
            restored_pages=self._restored,
            evicted_pages=self._evicted,
            corrupt_pages=self._corrupt,
            errors=self._errors,
        )

    # What the hub says

    def recall(self, names: Iterable[bytes]) -> None:
        """Brings back those of `names` that are on disk and not in the arena, as it has room."""
        if not self._slots:
            return
        for name in names:
            if name in self._slots and self._index.get(name) is None:
                self._wanted[name] = None
        self.pump()

    def fill(self, owner: str, page: Page) -> None:
        """Reads `page`, which `owner` has reserved and which is on disk. It is given up when that fails."""
        slot = self._slots[page.name]
        self._slots.move_to_end(page.name)
        slot.readers += 1
        self._index.hold(page)
        self._filling[page] = owner
        view = self._arena[page.offset : page.offset + page.layout.page_bytes]

        def read() -> bool:
            self._disk.read(slot.offset, view)
            return not wrong_parts(view, slot.checksums)

        self._run(read, lambda result: self._filled(page, slot, result))

    def on_changes(self, changes: Changes) -> None:
        """What happened in the arena."""
        if not self.on:
            return
        for name in changes.removed:
            self._unsaved.pop(name, None)
        for page in changes.idle:
            if page.name in self._slots:
                self._slots.move_to_end(page.name)
            else:
                self._unsaved[page.name] = page
                self._unsaved.move_to_end(page.name)
        self.pump()

    def forget_layouts(self, layouts: Collection[Layout]) -> None:
        """Pages of these layouts are of no use any more."""
        for name in [name for name, slot in self._slots.items() if slot.layout in layouts]:
            self._drop(name)

    def take_removed(self) -> list[bytes]:
        """Pages that went from the disk since the last call and are not in the arena either."""
        removed, self._removed = self._removed, []
        return [name for name in removed if not self._index.complete(name) and name not in self._slots]

    def tick(self, now: float) -> None:
        """Notices a disk that does not answer. Call a few times a second."""
        if self._began and now - next(iter(self._began.values())) >= STUCK_SECONDS:
            self._end(f"no answer for {STUCK_SECONDS:.0f} s")
        self.pump()

    def pump(self) -> None:
        """Starts what there is room for: reads that are asked for, then writes."""
        if self._wanted:
            self._restore()
        while (
            self._unsaved
            and self.on
            and self._writes < MAX_WRITES
            and self._index.free_bytes < self._index.capacity * WATERMARK
        ):
            name, page = self._unsaved.popitem(last=False)
            if not page.dropped and name not in self._slots:
                self._save(page)

    # Reading

    def _restore(self) -> None:
        for name in list(self._wanted):
            slot = self._slots.get(name)
            if slot is None or self._index.get(name) is not None:
                del self._wanted[name]
                continue
            if len(self._filling) >= MAX_READS or not self._begin(name, slot.layout):
                return
            del self._wanted[name]

    def _begin(self, name: bytes, layout: Layout) -> bool:
        if aligned(layout.page_bytes) > self._index.available:
            return False
        try:
            self._index.reserve(OWNER, [name], [PageKind.PREFIX], lambda _: layout)
        except ArenaFullError:  # enough room in all, but in pieces too small
            return False
        page = self._index.get(name)
        assert page is not None
        self.fill(OWNER, page)
        return True

    def _filled(self, page: Page, slot: Slot, result: bool | OSError) -> None:
        owner = self._filling.pop(page)
        slot.readers -= 1
        if slot.dropped and not slot.readers:
            self._room.free(slot.offset, slot.layout.page_bytes)
        if not page.dropped:
            if result is True and not slot.dropped:
                self._restored += 1
                page.from_disk = True
                self._index.publish(owner, page.name, 0, slot.checksums, slot.fidelity)
            else:
                self._index.give_up(owner, [page.name])
        self._index.unhold(page)
        if result is not True:
            self._failed(page.name, slot, result)

    def _failed(self, name: bytes, slot: Slot, result: bool | OSError) -> None:
        if isinstance(result, OSError):
            self._count_error("read", result)
        else:
            logger.error("a page on disk is corrupt")
            self._corrupt += 1
        if self._slots.get(name) is slot:
            self._drop(name)

    # Writing

    def _save(self, page: Page) -> None:
        offset = self._make_room(page.layout.page_bytes)
        if offset is None:
            return
        self._writes += 1
        slot = Slot(page.layout, page.checksums, page.fidelity, offset)
        view = self._arena[page.offset : page.offset + page.layout.page_bytes]

        def write() -> bool:
            self._disk.write(offset, view)
            return True

        self._run(write, lambda result: self._saved(page, slot, result))

    def _saved(self, page: Page, slot: Slot, result: bool | OSError) -> None:
        self._writes -= 1
        if isinstance(result, OSError):
            self._count_error("write", result)
        elif not page.dropped and self.on and page.name not in self._slots:
            self._written += 1
            self._slots[page.name] = slot
            return
        self._room.free(slot.offset, slot.layout.page_bytes)  # INV-DISK-1: what was read may have been another page's

    def _make_room(self, size: int) -> int | None:
        while (offset := self._room.allocate(size)) is None:
            oldest = next((name for name, slot in self._slots.items() if not slot.readers), None)
            if oldest is None:
                return None
            self._evicted += 1
            self._drop(oldest)
        return offset

    # Inside

    def _run(self, work: Callable[[], bool], then: Callable[[bool | OSError], None]) -> None:
        self._operations += 1
        operation = self._operations
        self._began[operation] = self._clock()

        def done(result: bool | OSError) -> None:
            del self._began[operation]
            if not isinstance(result, OSError):
                self._errors_in_a_row = 0
            then(result)
            self.pump()
            self.after()

        self._disk.run(work, done)

    def _drop(self, name: bytes) -> None:
        slot = self._slots.pop(name)
        slot.dropped = True
        if not slot.readers:
            self._room.free(slot.offset, slot.layout.page_bytes)
        self._removed.append(name)

    def _count_error(self, verb: str, error: OSError) -> None:
        self._errors += 1
        self._errors_in_a_row += 1
        logger.error("disk tier: cannot %s: %s", verb, error.strerror or error)
        if self._errors_in_a_row >= MAX_ERRORS:
            self._end(f"{MAX_ERRORS} errors in a row, the last: {error.strerror or error}")

    def _end(self, trouble: str) -> None:
        """The depot goes on without a disk tier."""
        if not self.trouble:
            self.trouble = trouble
            logger.error("the disk tier is off: %s", trouble)
        for name in list(self._slots):
            self._drop(name)
        self._unsaved.clear()
        self._wanted.clear()
        for page, owner in self._filling.items():
            if not page.dropped:  # who needs it gets it elsewhere, into other room: a thread may still write to this
                self._index.give_up(owner, [page.name])
