from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.depot.arena import ALIGNMENT, Arena, ExtentAllocator, aligned, map_arena


def test_a_second_mapping_sees_the_same_bytes() -> None:
    arena = Arena(1 << 16)
    mapping = map_arena(os.dup(arena.fd))
    arena.view[100:105] = b"hello"
    assert mapping[100:105] == b"hello"
    mapping.close()
    arena.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=60))
def test_extents_never_overlap_and_all_room_comes_back(steps: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator(64 * ALIGNMENT)
    live: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            start = allocator.allocate(number)
            if start is not None:
                assert all(start + number <= other or other + size <= start for other, size in live)
                assert start + number <= allocator.capacity
                live.append((start, number))
        elif live:
            allocator.free(*live.pop(number % len(live)))
        assert allocator.free_bytes == allocator.capacity - sum(aligned(size) for _, size in live)
    for extent in live:
        allocator.free(*extent)
    assert allocator.allocate(allocator.capacity) == 0
