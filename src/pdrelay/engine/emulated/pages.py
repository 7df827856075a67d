"""The bytes of emulated KV pages, and what a page says when it is read back.

A page computed from right KV has bytes that follow from its name alone. What was computed on top of wrong KV is wrong
too, and so are its bytes: they follow from name and drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b, shake_128

import xxhash

from pdrelay.depot.base import Part
from pdrelay.kv.contract import KVContract

RIGHT = b""
"""Drift of KV that is what its name stands for."""

_PATTERN_BYTES = 168  # repeated over the part: real bytes at the price of one block of the hash


def part_content(contract: KVContract, name: bytes, part: int, drift: bytes) -> bytes:
    """The bytes of one part of a page computed here."""
    pattern = shake_128(name + part.to_bytes(4, "little") + drift).digest(_PATTERN_BYTES)
    size = contract.layout_of(name).part_bytes
    return (pattern * -(-size // _PATTERN_BYTES))[:size]


def write_parts(
    arena: memoryview, offset: int, contract: KVContract, name: bytes, parts: Iterable[int], drift: bytes
) -> list[Part]:
    """Writes parts of the page at byte `offset` of the arena."""
    written = []
    for part in parts:
        content = part_content(contract, name, part, drift)
        start = offset + part * len(content)
        arena[start : start + len(content)] = content
        written.append(Part(name, part, xxhash.xxh3_64_intdigest(content)))
    return written


def read_drift(arena: memoryview, offset: int, contract: KVContract, name: bytes) -> bytes:
    """Reads all bytes of a page: RIGHT when they are those of `name`, else a digest of them."""
    layout = contract.layout_of(name)
    for part in range(layout.parts):
        start = offset + part * layout.part_bytes
        # A copy compares by memcmp, a memoryview byte by byte.
        if bytes(arena[start : start + layout.part_bytes]) != part_content(contract, name, part, RIGHT):
            return xxhash.xxh3_128_digest(arena[offset : offset + layout.page_bytes])
    return RIGHT


def combine(before: bytes, page: bytes) -> bytes:
    """The drift of a context, given that of the pages before and that of the next page."""
    return before if page == RIGHT else blake2b(before + page, digest_size=16, person=b"pdrelay.drift").digest()
