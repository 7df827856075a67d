"""Lossless: bytes of equal significance together, each such plane compressed with Zstandard.

Sign and exponent of neighbouring elements are alike, mantissas are noise: apart, the first compress to a fraction and
the others are left as they are.

Encoding of a run: the size of each plane (uint32, little-endian), then the planes, least significant byte first. A
plane as long as the run has elements is stored as it is, a shorter one is a Zstandard frame that states its size.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt
import zstandard

from pdrelay.cluster.topology import CodecName
from pdrelay.depot.codec.base import Encoded
from pdrelay.errors import ProtocolError
from pdrelay.kv.shape import PartShape

LEVEL = 1
"""Higher levels search longer for repetitions, which KV does not have: slower, and no smaller."""

HASH_LOG = 6
"""A small table of earlier bytes: what little repeats is near, and the table stays in the first-level cache."""

Bytes = npt.NDArray[np.uint8]


class ZstdCodec:
    """A `WireCodec` that keeps every bit, of any dtype."""

    name: CodecName = "zstd"
    lossless = True

    def __init__(self) -> None:
        self._contexts = threading.local()  # a context serves one thread at a time

    def encode(self, parts: memoryview, part_bytes: int, shape: PartShape) -> Encoded | None:
        """See WireCodec."""
        width = _width(part_bytes, shape)
        planes = [self._smaller(plane) for plane in _split(parts, width)]
        head = struct.pack(f"<{width}I", *map(len, planes))
        encoded = b"".join((head, *planes))
        return encoded if len(encoded) < len(parts) else None

    def decode(self, encoded: memoryview, into: memoryview, part_bytes: int, shape: PartShape) -> int:
        """See WireCodec."""
        width = _width(part_bytes, shape)
        head = struct.Struct(f"<{width}I")
        if len(encoded) < head.size:
            raise ProtocolError(f"a zstd run of {len(encoded)} bytes")
        sizes = head.unpack_from(encoded)
        if sum(sizes) != len(encoded) - head.size:
            raise ProtocolError(f"zstd planes of {sum(sizes)} bytes in a run of {len(encoded)}")
        at, merged = head.size, np.frombuffer(into, np.uint8).reshape(-1, width)
        for index, size in enumerate(sizes):
            merged[:, index] = self._plane(encoded[at : at + size], len(merged))
            at += size
        return 0

    def _smaller(self, plane: Bytes) -> bytes:
        packed: bytes = self._compressor().compress(plane.data)
        return packed if len(packed) < len(plane) else plane.tobytes()

    def _plane(self, data: memoryview, size: int) -> Bytes:
        if len(data) == size:
            return np.frombuffer(data, np.uint8)
        try:
            if zstandard.frame_content_size(data) != size:  # else the frame decides how much is allocated
                raise ProtocolError(f"a zstd plane that does not state {size} bytes")
            plane = self._decompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"a zstd plane: {error}") from error
        if len(plane) != size:
            raise ProtocolError(f"a zstd plane of {len(plane)} bytes, expected {size}")
        return np.frombuffer(plane, np.uint8)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._contexts, "compressor"):
            parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, hash_log=HASH_LOG)
            self._contexts.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        compressor: zstandard.ZstdCompressor = self._contexts.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._contexts, "decompressor"):
            self._contexts.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._contexts.decompressor
        return decompressor


def _width(part_bytes: int, shape: PartShape) -> int:
    return shape.item_bytes if part_bytes % shape.item_bytes == 0 else 1


def _split(parts: memoryview, width: int) -> list[Bytes]:
    if width == 1:
        return [np.frombuffer(parts, np.uint8)]
    words = np.frombuffer(parts, f"<u{width}")
    return [(words >> words.dtype.type(8 * byte)).astype(np.uint8) for byte in range(width)]
