"""Which pages the engine's own prefix cache holds, told from the blocks that it hands out.

vLLM keeps a full block's content until it gives the block to another request. So a name enters when its block is
full, and leaves when the block is seen under another content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HeldChanges(NamedTuple):
    """Names that entered and left since the last look."""

    added: list[bytes]
    removed: list[bytes]


class HeldBlocks:
    """Block to name, for blocks with known content. One name may fill several blocks."""

    def __init__(self) -> None:
        self._names: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._reported: set[bytes] = set()
        self._touched: set[bytes] = set()

    def fill(self, block: int, name: bytes) -> None:
        """`block` is full with page `name`."""
        if self._names.get(block) != name:
            self._forget(block)
            self._names[block] = name
            self._blocks[name] = self._blocks.get(name, 0) + 1
            self._touched.add(name)

    def allocate(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """A request's blocks in token order, and the names of those that are full."""
        for index, block in enumerate(blocks):
            if index >= len(names) or self._names.get(block) != names[index]:
                self._forget(block)

    def clear(self) -> None:
        """The prefix cache was emptied."""
        for block in list(self._names):
            self._forget(block)

    def forget_reports(self) -> None:
        """The depot that was told is gone; the next look tells everything."""
        self._reported.clear()
        self._touched = set(self._blocks)

    def take_changes(self) -> HeldChanges:
        """What changed since the last call."""
        touched, self._touched = self._touched, set()
        added = [name for name in touched if name in self._blocks and name not in self._reported]
        removed = [name for name in touched if name not in self._blocks and name in self._reported]
        self._reported.update(added)
        self._reported.difference_update(removed)
        return HeldChanges(added, removed)

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is None:
            return
        self._touched.add(name)
        self._blocks[name] -= 1
        if not self._blocks[name]:
            del self._blocks[name]
