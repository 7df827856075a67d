"""The arena: one shared anonymous file that holds all KV pages of a host, and the allocator of its extents."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, insort

from pdrelay.cluster.topology import HugePages
from pdrelay.depot.huge_pages import advise, memory_file

ALIGNMENT = 64
"""Extents start and end on cache lines."""


def aligned(size: int) -> int:
    """`size` bytes rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """`capacity` bytes of memory that others can map from `fd`. Nothing is left behind when the last mapping goes.

    Raises OSError, and StartError when there are no such huge pages. They may round the capacity up.
    """

    def __init__(self, capacity: int, huge_pages: HugePages = "off") -> None:
        self.transparent = huge_pages == "transparent"
        self.fd, self._map = memory_file(capacity, huge_pages)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps the arena; views that others still hold keep their part of the memory alive."""
        os.close(self.fd)
        close_map(self._map, self.view)


def map_arena(fd: int, *, transparent: bool = False) -> mmap.mmap:
    """Maps an arena from its descriptor, which is closed. `transparent`: the arena asks for huge pages where it can."""
    try:
        mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    if transparent:
        advise(mapping)
    return mapping


def close_map(mapping: mmap.mmap, view: memoryview) -> None:
    """Closes `mapping` unless someone still looks at it through `view`; the garbage collector closes it then."""
    try:
        view.release()
        mapping.close()
    except BufferError:
        return


class ExtentAllocator:
    """Best fit with coalescing. Equal sizes cost O(1), others O(log n) in the number of distinct free sizes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.free_bytes = 0
        self._size_at: dict[int, int] = {}  # start of a free extent -> its size
        self._start_of_end: dict[int, int] = {}  # end of a free extent -> its start
        self._starts: dict[int, dict[int, None]] = {}  # size -> starts of free extents of that size
        self._sizes: list[int] = []  # the keys of _starts, sorted
        if self.capacity:
            self._insert(0, self.capacity)

    def allocate(self, size: int) -> int | None:
        """Start of an extent of `size` bytes (rounded up to cache lines), None when no free extent is large enough."""
        size = aligned(size)
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return None
        found = self._sizes[at]
        start = next(iter(self._starts[found]))
        self._remove(start, found)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def free(self, start: int, size: int) -> None:
        """Gives an extent back."""
        size = aligned(size)
        end = start + size
        assert start not in self._size_at, "INV-DEPOT-1: an extent is freed once"
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._size_at.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._insert(start, end - start)

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        if size not in self._starts:
            self._starts[size] = {}
            insort(self._sizes, size)
        self._starts[size][start] = None
        self.free_bytes += size

    def _remove(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_of_end[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.free_bytes -= size
