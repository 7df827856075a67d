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
    """Bitmap of the parts in bitmap `parts` whose bytes do not fit their checksum; `data` is the bytes of all parts."""
    size = len(data) // len(checksums)
    found = [checksum(data[at : at + size]) for at in range(0, len(data), size)]
    wrong = 0
    if found != list(checksums):
        for part, (actual, expected) in enumerate(zip(found, checksums, strict=True)):
            wrong |= (actual != expected) << part
    return wrong & parts
