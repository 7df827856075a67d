from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.cluster.topology import HugePages
from pdrelay.depot.arena import ALIGNMENT, Arena, ExtentAllocator, aligned, map_arena
from pdrelay.depot.huge_pages import SYSFS
from pdrelay.errors import StartError


def test_a_second_mapping_sees_the_same_bytes() -> None:
    arena = Arena(1 << 16)
    mapping = map_arena(os.dup(arena.fd))
    arena.view[100:105] = b"hello"
    assert mapping[100:105] == b"hello"
    mapping.close()
    arena.close()


@pytest.mark.parametrize(("huge_pages", "size"), [("2MiB", 2 << 20), ("1GiB", 1 << 30)])
def test_reserved_huge_pages_are_used_or_missed_with_a_remedy(huge_pages: HugePages, size: int) -> None:
    pool = SYSFS / "hugepages" / f"hugepages-{size >> 10}kB" / "free_hugepages"
    free = int(pool.read_text()) if pool.exists() else 0
    if free:
        arena = Arena(100, huge_pages)
        assert len(arena.view) == size
        arena.view[0] = 1
        arena.close()
    with pytest.raises(
        StartError, match=rf"huge_pages: found (\d+|no) free pages of {huge_pages}, expected {free + 1} "
    ):
        Arena(free * size + 1, huge_pages)


@pytest.mark.parametrize("chosen", ["always", "within_size", "advise", "never", "deny"])
def test_transparent_huge_pages_need_the_kernels_leave(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["always", "within_size", "advise", "never", "deny", "force"]
    setting = tmp_path / "transparent_hugepage" / "shmem_enabled"
    setting.parent.mkdir()
    setting.write_text(" ".join(f"[{word}]" if word == chosen else word for word in words))
    monkeypatch.setattr("pdrelay.depot.huge_pages.SYSFS", tmp_path)
    if chosen in ("never", "deny"):
        with pytest.raises(StartError, match=f"huge_pages: found {chosen} in .*expected advise.*`echo advise > "):
            Arena(1 << 22, "transparent")
        return
    arena = Arena(1 << 22, "transparent")
    mapping = map_arena(os.dup(arena.fd), transparent=True)
    assert advised_mappings() >= 2
    mapping.close()
    arena.close()


def advised_mappings() -> int:
    """Mappings of arenas in this process that ask for huge pages."""
    count, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = "pdrelay-arena" in line
        count += ours and line.startswith("VmFlags") and " hg" in line
    return count


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
