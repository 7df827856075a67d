"""Prefix caches: leading hits, eviction, and an index that agrees with what is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.sim.cache import BlockCache, BlockIndex
from pdrelay.workload.base import Request


def prompt(*blocks: int, cached: int = -1, tokens: int | None = None) -> Request:
    return Request(0.0, 10 * len(blocks) if tokens is None else tokens, 1, blocks, cached, block_tokens=10)


def test_leading_blocks_count_and_gaps_do_not() -> None:
    index = BlockIndex()
    near, far = BlockCache(index, 100), BlockCache(index, 100)
    near.store([1, 2, 3], 1)
    far.store([1, 3], 1)
    holders = {"near": near.bit, "far": far.bit, "both": near.bit | far.bit, "none": 0}
    assert index.held(prompt(1, 2, 3, 4), holders) == {"near": 30, "far": 10, "both": 30, "none": 0}
    assert index.held(prompt(1, 2, tokens=17), holders)["near"] == 17
    assert index.held(prompt(9), holders) == dict.fromkeys(holders, 0)
    assert index.held(prompt(tokens=50), holders) == dict.fromkeys(holders, 0)


def test_a_declared_hit_rate_holds_everywhere() -> None:
    assert BlockIndex().held(prompt(1, cached=7), {"a": 1, "b": 2}) == {"a": 7, "b": 7}


def test_the_end_of_the_oldest_prefix_goes_first() -> None:
    index = BlockIndex()
    cache = BlockCache(index, 4)
    cache.store([1, 2, 3], 1)
    cache.store([7, 8], 1)
    assert index.held(prompt(1, 2, 3), {"c": cache.bit}) == {"c": 20}
    cache.store([1, 2], 1)
    cache.store([9], 1)
    assert index.held(prompt(7, 8), {"c": cache.bit}) == {"c": 10}


def test_pinned_bytes_leave_less_for_the_cache() -> None:
    index = BlockIndex()
    cache = BlockCache(index, 4)
    cache.store([1, 2, 3, 4], 1)
    cache.pin(3)
    assert len(cache) == 1
    assert not cache.has_room(2)
    cache.unpin(3)
    assert cache.has_room(4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "pin", "unpin", "clear"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 15), unique=True, max_size=6),
        ),
        max_size=40,
    )
)
def test_the_index_is_what_the_caches_hold(operations: list[tuple[str, int, list[int]]]) -> None:
    index = BlockIndex()
    caches = [BlockCache(index, 5), BlockCache(index, 3)]
    pinned = [0, 0]
    for operation, which, blocks in operations:
        cache = caches[which]
        if operation == "store":
            cache.store(blocks, 1)
        elif operation == "pin" and cache.has_room(1):
            cache.pin(1)
            pinned[which] += 1
        elif operation == "unpin" and pinned[which]:
            cache.unpin(1)
            pinned[which] -= 1
        elif operation == "clear":
            cache.clear()
        assert len(caches[0]) <= 5 - pinned[0]
        assert len(caches[1]) <= 3 - pinned[1]
        for cache in caches:
            held = sum(1 for mask in index.masks.values() if mask & cache.bit)
            assert held == len(cache)
        assert all(index.masks.values())
