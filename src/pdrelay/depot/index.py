"""The index of pages: who writes what, who pins what, what goes when room is needed. Pure state, no I/O, no clock.

An *owner* is a string. It writes pages (one writer a name), pins names and leases pages. A pin keeps whatever copy a
name has, and may come before it: so a transfer keeps what is still being produced. A lease keeps the bytes of one copy
where they are, whatever becomes of the name, until its owner has read them.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from pdrelay.depot.arena import ExtentAllocator, aligned
from pdrelay.depot.base import Fidelity, PageKind
from pdrelay.depot.page import Changes, Lost, Page
from pdrelay.errors import ArenaFullError, ProtocolError
from pdrelay.kv.contract import Layout

UNCLAIMED_SECONDS = 2.0
"""A complete transfer page stays so long for a transfer that its depot hears of only now."""


@dataclass(slots=True)
class Holdings:
    """What one owner holds, in the order it took it."""

    pins: dict[bytes, None] = field(default_factory=dict)
    writes: dict[bytes, None] = field(default_factory=dict)
    leases: dict[Page, None] = field(default_factory=dict)


class Index:
    """The pages of one arena of `capacity` bytes. `epoch_base` must grow from one start of the depot to the next."""

    def __init__(self, capacity: int, epoch_base: int = 0) -> None:
        self._allocator = ExtentAllocator(capacity)
        self._pages: dict[bytes, Page] = {}
        self._pins: dict[bytes, dict[str, None]] = {}
        self._owners: dict[str, Holdings] = {}
        self._idle: OrderedDict[bytes, Page] = OrderedDict()  # complete and unpinned, next to go first
        self._idle_bytes = 0
        self._unclaimed: dict[Page, float] = {}  # idle transfer pages, and when `expire` first saw them; inf: not yet
        self._epoch = epoch_base
        self._changes = Changes()
        self.evicted = 0
        self.condemned = 0
        self.reserve_waits = 0

    # Looking

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self._allocator.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes that pages take."""
        return self._allocator.capacity - self._allocator.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no page takes."""
        return self._allocator.free_bytes

    @property
    def available(self) -> int:
        """Bytes that a new page may take: free ones and those of unpinned pages."""
        return self._allocator.free_bytes + self._idle_bytes

    @property
    def owners(self) -> int:
        """Owners that hold something."""
        return len(self._owners)

    @property
    def pinned(self) -> int:
        """Complete pages with a pin or a lease."""
        return sum(page.complete and page.name not in self._idle for page in self)

    @property
    def reserved(self) -> int:
        """Pages with a writer."""
        return sum(len(holdings.writes) for holdings in self._owners.values())

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def get(self, name: bytes) -> Page | None:
        """The page called `name`, None when it is absent."""
        return self._pages.get(name)

    def complete(self, name: bytes) -> bool:
        """Whether the page is complete."""
        page = self._pages.get(name)
        return page is not None and page.writer is None

    def match(self, names: Sequence[bytes]) -> int:
        """How many leading `names` are complete; those count as used just now."""
        count = 0
        for name in names:
            page = self._pages.get(name)
            if page is None or page.writer is not None:
                break
            count += 1
        self.touch(names[:count])
        return count

    def touch(self, names: Sequence[bytes]) -> None:
        """The pages of a prefix count as used just now. Its last page is worth least, and the first to go."""
        for name in reversed(names):
            if name in self._idle:
                self._idle.move_to_end(name)

    def take_changes(self) -> Changes:
        """What happened since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    # Pinning

    def pin(self, owner: str, names: Sequence[bytes]) -> None:
        """Pins `names`, absent ones included."""
        if not names:
            return
        pins = self._holdings(owner).pins
        for name in names:
            pins[name] = None
            self._pins.setdefault(name, {})[owner] = None
            page = self._pages.get(name)
            if page is not None and page.writer != owner:
                page.claimed = True
                self._leave_idle(page)

    def lease(self, owner: str, names: Sequence[bytes]) -> list[Page]:
        """Leases the leading complete pages of `names` to `owner` until it is released."""
        pages = [self._pages[name] for name in names[: self.match(names)]]
        for page in pages:
            page.claimed = True
            self._lease_one(owner, page)
        return pages

    def leased(self, owner: str) -> list[Page]:
        """The pages that `owner` leases, condemned ones included."""
        holdings = self._owners.get(owner)
        return list(holdings.leases) if holdings is not None else []

    def unpin(self, owner: str, names: Sequence[bytes]) -> None:
        """Ends the pins of `owner` on `names`."""
        holdings = self._owners.get(owner)
        if holdings is None:
            return
        for name in reversed(names):
            if name in holdings.pins:
                del holdings.pins[name]
                self._unpin_one(owner, name)
        self._forget_if_empty(owner, holdings)

    # Writing

    def reserve(
        self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind], layout_of: Callable[[bytes], Layout]
    ) -> list[int | None]:
        """Makes `owner` the writer of each absent page. Raises ArenaFullError, and reserves none, without room.

        The other pages of `names` are not evicted for it.
        """
        fresh = {name: kind for name, kind in zip(names, kinds, strict=True) if name not in self._pages}
        if not fresh:
            return [None] * len(names)
        layouts = {name: layout_of(name) for name in fresh}
        others = [self._idle[name] for name in dict.fromkeys(names) if name in self._idle]
        for page in others:
            self.hold(page)
        try:
            offsets = dict(zip(fresh, self._allocate([at.page_bytes for at in layouts.values()]), strict=True))
        finally:
            for page in reversed(others):
                self.unhold(page)
        holdings = self._holdings(owner)
        for name, kind in fresh.items():
            self._epoch += 1
            page = self._pages[name] = Page(name, kind, layouts[name], offsets[name], self._epoch, owner)
            page.checksums.frombytes(bytes(8 * layouts[name].parts))
            page.claimed = name in self._pins
            holdings.writes[name] = None
            self._changes.reserved.append(name)
            if kind is PageKind.TRANSFER:
                self.pin(owner, [name])  # or it would go the moment it is complete
        return [offsets.pop(name, None) for name in names]

    def publish(self, owner: str, name: bytes, first: int, checksums: Sequence[int], fidelity: Fidelity = "") -> bool:
        """The parts from `first` on are written; False when `owner` is not (or no longer) the writer.

        Raises ProtocolError for a part that the page does not have.
        """
        page = self._pages.get(name)
        if page is None or page.writer != owner:
            return False
        last = first + len(checksums)
        if first < 0 or last > page.layout.parts:
            raise ProtocolError(f"part {last - 1} of a page with {page.layout.parts} parts")
        fresh = ((1 << len(checksums)) - 1) << first & ~page.have
        if fresh:
            page.checksums[first:last] = array("Q", checksums)
            page.have |= fresh
            page.fidelity = fidelity or page.fidelity
            self._changes.published.append((page, fresh))
            if page.have == (1 << page.layout.parts) - 1:
                self._complete(page, owner)
        return True

    def restart(self, owner: str, name: bytes) -> None:
        """Forgets the parts that `owner` has written of a page that is not complete."""
        page = self._pages[name]
        assert page.writer == owner, "INV-DEPOT-2: a page has one writer"
        self._epoch += 1
        page.have, page.epoch, page.fidelity = 0, self._epoch, ""

    def give_up(self, owner: str, names: Sequence[bytes], *, died: bool = False) -> None:
        """Drops those of `names` that `owner` writes."""
        holdings = self._owners.get(owner)
        if holdings is None:
            return
        for name in names:
            if name in holdings.writes:
                del holdings.writes[name]
                self._changes.lost.append(Lost(name, died))
                self._drop(self._pages[name])
        self._forget_if_empty(owner, holdings)

    def release(self, owner: str, *, died: bool = False, late: str = "") -> None:
        """Ends all that `owner` holds. `died` says that it went away without a word.

        `late` is an owner that keeps the room of what it was writing, since somebody may still write there.
        """
        holdings = self._owners.get(owner)
        if holdings is None:
            return
        for name in holdings.writes if late else ():
            self._lease_one(late, self._pages[name])
        self.give_up(owner, list(holdings.writes), died=died)
        self.unpin(owner, list(holdings.pins))
        leases = list(holdings.leases)
        holdings.leases.clear()
        self._forget_if_empty(owner, holdings)
        for page in reversed(leases):
            self.unhold(page)
        assert owner not in self._owners, "INV-DEPOT-3: a released owner holds nothing"

    def condemn(self, page: Page) -> None:
        """The bytes of `page` are wrong: it is absent from now on, and its room free once nobody reads it."""
        if page.dropped:
            return
        self.condemned += 1
        if page.writer is not None:
            self._lease_one(page.writer, page)  # it may be writing: the room is not free before it is released
            self.give_up(page.writer, [page.name], died=True)
            return
        self._changes.lost.append(Lost(page.name, died=True))
        self._remove(page)

    def expire(self, now: float) -> None:
        """Drops the transfer pages that no transfer has claimed in time. Call a few times a second."""
        for page, since in list(self._unclaimed.items()):
            if since > now:
                self._unclaimed[page] = now
            elif now - since >= UNCLAIMED_SECONDS:
                self._remove(page)

    # Those that touch bytes

    def hold(self, page: Page) -> None:
        """Keeps the page's bytes where they are, whatever becomes of the page, until `unhold`."""
        page.users += 1
        if page.users == 1:
            self._leave_idle(page)

    def unhold(self, page: Page) -> None:
        """Ends one `hold`."""
        page.users -= 1
        assert page.users >= 0
        if page.users == 0:
            if page.dropped:
                self._free(page)
            else:
                self._settle(page)

    def in_use(self, layouts: Collection[Layout]) -> bool:
        """Whether a page of one of these layouts is pinned, being written or being read."""
        return any(page.layout in layouts and page.name not in self._idle for page in self)

    def evict_all(self, layouts: Collection[Layout]) -> None:
        """Drops every unpinned complete page of these layouts."""
        for page in [page for page in self._idle.values() if page.layout in layouts]:
            self._evict(page)

    # Inside

    def _holdings(self, owner: str) -> Holdings:
        return self._owners.setdefault(owner, Holdings())

    def _lease_one(self, owner: str, page: Page) -> None:
        leases = self._holdings(owner).leases
        if page not in leases:
            leases[page] = None
            self.hold(page)

    def _forget_if_empty(self, owner: str, holdings: Holdings) -> None:
        if not holdings.pins and not holdings.writes and not holdings.leases:
            self._owners.pop(owner, None)

    def _unpin_one(self, owner: str, name: bytes) -> None:
        pins = self._pins[name]
        del pins[owner]
        if not pins:
            del self._pins[name]
            if (page := self._pages.get(name)) is not None:
                self._settle(page)

    def _complete(self, page: Page, owner: str) -> None:
        page.writer = None
        holdings = self._owners[owner]
        del holdings.writes[page.name]
        self._changes.completed.append(page.name)
        self._settle(page)
        self._forget_if_empty(owner, holdings)

    def _settle(self, page: Page) -> None:
        """Puts a page that became unused where it belongs: in line for eviction, or away."""
        if page.writer is not None or page.users or page.name in self._pins:
            return
        if page.kind is PageKind.TRANSFER and page.claimed:
            self._remove(page)
            return
        if page.name not in self._idle:
            self._idle[page.name] = page
            self._idle_bytes += aligned(page.layout.page_bytes)
            self._changes.room = True
            if page.kind is PageKind.TRANSFER:
                self._unclaimed[page] = math.inf
                self._idle.move_to_end(page.name, last=False)
            else:
                self._changes.idle.append(page)

    def _leave_idle(self, page: Page) -> None:
        if self._idle.pop(page.name, None) is not None:
            self._idle_bytes -= aligned(page.layout.page_bytes)
            self._unclaimed.pop(page, None)

    def _evict(self, page: Page) -> None:
        assert page.name not in self._pins, "INV-DEPOT-4: a pinned page is never evicted"
        assert not page.users, "INV-DEPOT-4: a leased page is never evicted"
        self.evicted += 1
        self._remove(page)

    def _remove(self, page: Page) -> None:
        """A complete page goes."""
        self._leave_idle(page)
        self._changes.removed.append(page.name)
        self._drop(page)

    def _drop(self, page: Page) -> None:
        del self._pages[page.name]
        page.dropped = True
        if page.users == 0:
            self._free(page)

    def _free(self, page: Page) -> None:
        self._allocator.free(page.offset, page.layout.page_bytes)
        self._changes.room = True

    def _allocate(self, sizes: Sequence[int]) -> list[int]:
        needed = sum(aligned(size) for size in sizes)
        available = self.available
        offsets: list[int] = []
        while needed <= available and len(offsets) < len(sizes):
            offset = self._allocator.allocate(sizes[len(offsets)])
            if offset is not None:
                offsets.append(offset)
            elif self._idle:
                self._evict(next(iter(self._idle.values())))
            else:  # enough bytes, but in pieces too small
                break
        if len(offsets) == len(sizes):
            return offsets
        for offset, size in zip(offsets, sizes, strict=False):  # the first of them were had
            self._allocator.free(offset, size)
        self.reserve_waits += 1
        raise ArenaFullError(needed, available, self.capacity)
