"""Which pages the engine's own prefix cache holds, told from the blocks that it hands out.

vLLM keeps a full block's content until it gives the block to another request. So a page enters when its blocks are
full, and leaves when one of them is handed out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class HeldChanges(NamedTuple):
    """Names that entered and left since the last look."""

    added: list[bytes]
    removed: list[bytes]


class _Place(NamedTuple):
    name: bytes
    slot: int  # which of the page's blocks


class HeldBlocks:
    """What blocks hold. A page is `slots` blocks, of one or more block tables; several blocks may hold the same."""

    def __init__(self, slots: int = 1) -> None:
        self._slots = slots
        self._places: dict[int, _Place] = {}
        self._counts: dict[bytes, list[int]] = {}  # blocks that hold it, by slot
        self._reported: set[bytes] = set()
        self._touched: set[bytes] = set()

    def fill(self, blocks: Sequence[int], name: bytes) -> None:
        """`blocks`, one a slot, are full with page `name`."""
        for slot, block in enumerate(blocks):
            place = _Place(name, slot)
            if self._places.get(block) != place:
                self._forget(block)
                self._places[block] = place
                self._counts.setdefault(name, [0] * self._slots)[slot] += 1
                self._touched.add(name)

    def hand_out(self, blocks: Iterable[int]) -> None:
        """These blocks belong to a request now, and what they held is gone."""
        for block in blocks:
            self._forget(block)

    def clear(self) -> None:
        """The prefix cache was emptied."""
        self.hand_out(list(self._places))

    def forget_reports(self) -> None:
        """The depot that was told is gone; the next look tells everything."""
        self._reported.clear()
        self._touched = set(self._counts)

    def take_changes(self) -> HeldChanges:
        """What changed since the last call."""
        touched, self._touched = self._touched, set()
        held = {name for name in touched if name in self._counts and all(self._counts[name])}
        added = [name for name in touched if name in held and name not in self._reported]
        removed = [name for name in touched if name not in held and name in self._reported]
        self._reported.update(added)
        self._reported.difference_update(removed)
        return HeldChanges(added, removed)

    def _forget(self, block: int) -> None:
        place = self._places.pop(block, None)
        if place is None:
            return
        self._touched.add(place.name)
        counts = self._counts[place.name]
        counts[place.slot] -= 1
        if not any(counts):
            del self._counts[place.name]
