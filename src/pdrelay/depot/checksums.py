"""Checksums of parts: xxh3_64 of a part's bytes, packed as they travel: uint64, little-endian, one a part."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

checksum = xxh3_64_intdigest


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Checksums as they travel."""
    packed = array("Q", checksums)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_checksums(data: bytes) -> array[int]:
    """The inverse of `pack_checksums`."""
    packed = array("Q", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def wrong_parts(data: memoryview, checksums: Sequence[int], parts: int = -1) -> int:
    """Bitmap of the parts in bitmap `parts` whose bytes do not fit their checksum; `data` is a whole page."""
    size, wrong = len(data) // len(checksums), 0
    for part, expected in enumerate(checksums):
        if parts >> part & 1 and checksum(data[part * size : (part + 1) * size]) != expected:
            wrong |= 1 << part
    return wrong
