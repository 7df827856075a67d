"""Copies of pages in the arena, and what happens to them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from pdrelay.depot.base import Fidelity, PageKind
from pdrelay.kv.contract import Layout


@dataclass(slots=True, eq=False)
class Page:
    """A page that has room in the arena. It is complete when it has no writer."""

    name: bytes
    kind: PageKind
    layout: Layout
    offset: int
    epoch: int  # grows with every new production of any page; parts of two epochs never mix
    writer: str | None
    have: int = 0  # bitmap of the parts that are written
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    fidelity: Fidelity = ""  # of the parts that are the least exact
    from_disk: bool = False  # it was read back from the disk tier and not leased since
    claimed: bool = False  # somebody has leased it, or pinned it besides its writer
    users: int = 0  # leases, and threads that read or write its bytes just now
    dropped: bool = False

    @property
    def complete(self) -> bool:
        """All parts are here."""
        return self.writer is None


class Lost(NamedTuple):
    """A page that others may wait for became absent: before it was complete, or because its bytes were wrong."""

    name: bytes
    died: bool  # nobody gave it up: its writer went away, or its bytes were wrong


@dataclass(slots=True)
class Changes:
    """What happened since the last look."""

    published: list[tuple[Page, int]] = field(default_factory=list)  # pages and bitmaps of their new parts
    reserved: list[bytes] = field(default_factory=list)  # absent names that have a writer now
    completed: list[bytes] = field(default_factory=list)
    idle: list[Page] = field(default_factory=list)  # complete prefix pages that nothing keeps any more
    removed: list[bytes] = field(default_factory=list)  # complete pages that went
    lost: list[Lost] = field(default_factory=list)
    room: bool = False  # more room can be had than before

    def __bool__(self) -> bool:
        happened = (self.published, self.reserved, self.completed, self.idle, self.removed, self.lost)
        return self.room or any(happened)
