"""Which cache holds which prefix blocks: engines' prefix caches and depots, least recently used first out.

All caches share one index from block to a bit mask of holders, so that finding what every instance holds of a prompt
costs one look-up a block, whatever the number of instances.

INV-SIM-CACHE-1: a cache never holds more blocks than fit beside what is pinned.
INV-SIM-CACHE-2: the index names exactly the blocks that the caches hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdrelay.workload.base import Request


class BlockIndex:
    """Block to the bit mask of its holders."""

    __slots__ = ("_bits", "masks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._bits = 0

    def bit(self) -> int:
        """A bit for a new holder."""
        self._bits += 1
        return 1 << (self._bits - 1)

    def held(self, request: Request, holders: Mapping[str, int]) -> dict[str, int]:
        """Leading prompt tokens that each holder mask has; a hit rate that the request declares holds everywhere."""
        if request.cached >= 0:
            return dict.fromkeys(holders, request.cached)
        masks = self.masks
        found: dict[str, int] = {}
        alive = list(holders.items())
        size = request.block_tokens
        for number, block in enumerate(request.blocks):
            mask = masks.get(block, 0)
            if not mask:
                break
            going_on = [item for item in alive if item[1] & mask]
            if len(going_on) != len(alive):
                for name, bits in alive:
                    if not bits & mask:
                        found[name] = number * size
                alive = going_on
        else:
            number = len(request.blocks)
        for name, _ in alive:
            found[name] = min(number * size, request.prompt) if request.blocks else 0
        return found


class BlockCache:
    """One holder's blocks, of `block_bytes` each."""

    __slots__ = ("_blocks", "_capacity", "_index", "_pinned", "bit", "evicted")

    def __init__(self, index: BlockIndex, capacity: float) -> None:
        """`capacity` in bytes."""
        self._index, self._capacity = index, capacity
        self._blocks: dict[int, float] = {}  # in order of use
        self._pinned = 0.0
        self.bit = index.bit()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, blocks: Sequence[int], block_bytes: float) -> None:
        """Adds `blocks`, or marks them as used; evicts what has not been used for longest."""
        held, masks, bit = self._blocks, self._index.masks, self.bit
        for block in reversed(blocks):  # the end of a prefix is evicted before its start
            if held.pop(block, None) is None:
                masks[block] = masks.get(block, 0) | bit
            held[block] = block_bytes
        self._shrink(block_bytes)

    def hold(self, size: float) -> None:
        """Leaves `size` bytes to others, in place of what was pinned before; takes effect with the next store."""
        self._pinned = size

    def pin(self, size: float) -> None:
        """Takes `size` bytes away from the cache until they are unpinned."""
        self._pinned += size
        if self._blocks:
            self._shrink(next(iter(self._blocks.values())))

    def unpin(self, size: float) -> None:
        """Gives `size` bytes back."""
        self._pinned = max(0.0, self._pinned - size)

    def has_room(self, size: float) -> bool:
        """True when `size` more bytes can be pinned, all else evicted if need be."""
        return self._pinned + size <= self._capacity

    def clear(self) -> None:
        """Loses everything, as when its engine dies."""
        self._drop(list(self._blocks))

    def _shrink(self, block_bytes: float) -> None:
        room = max(0, int((self._capacity - self._pinned) / block_bytes))
        excess = len(self._blocks) - room
        if excess > 0:
            oldest = iter(self._blocks)
            self._drop([next(oldest) for _ in range(excess)])
            self.evicted += excess

    def _drop(self, blocks: Iterable[int]) -> None:
        masks, keep = self._index.masks, ~self.bit
        for block in blocks:
            del self._blocks[block]
            left = masks[block] & keep
            if left:
                masks[block] = left
            else:
                del masks[block]
