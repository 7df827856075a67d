"""Lossy: an element in one byte, with a scale for the keys and one for the values of each head in an engine block.

Encoding of a run: a bitmap of the parts that are exact (little-endian, a byte for eight), the scales of the others
(float32, little-endian, keys and values of a head side by side), their codes, then the bytes of the exact parts.
All sizes follow from the bitmap. A part with an infinity, a NaN or magnitudes that scales cannot express is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pdrelay.cluster.topology import CodecName
from pdrelay.depot.codec.base import STEP_BYTES, Encoded
from pdrelay.depot.codec.floats import Array, Float32, bits_dtype, from_float32, peaks, to_float32
from pdrelay.errors import ProtocolError
from pdrelay.kv.shape import PartShape

Codes = npt.NDArray[np.uint8]

LEAST, MOST = np.float32(2.0**-100), np.float32(2.0**100)
"""A head's largest magnitude, if not zero; beyond them float32 scales lose their precision. KV is nowhere near."""

_REDUCED = (2, 4, 6)  # of `[parts, blocks, outer, heads, middle, 2, inner]`: what one scale is for


class Code(Protocol):
    """A one-byte number format. Both functions may overwrite what they are given."""

    name: CodecName
    top: float  # largest magnitude

    def pack(self, values: Float32) -> Codes:
        """Codes nearest to `values`, whose magnitudes are at most `top`."""
        ...

    def unpack(self, codes: Codes) -> Float32:
        """The values of `codes`."""
        ...


class Int8:
    """Two's complement, symmetric: steps of one."""

    name: CodecName = "int8"
    top = 127.0

    def pack(self, values: Float32) -> Codes:
        """See Code."""
        return np.rint(values, out=values).astype(np.int8).view(np.uint8)

    def unpack(self, codes: Codes) -> Float32:
        """See Code."""
        return codes.view(np.int8).astype(np.float32)


class Fp8:
    """E4M3 of the OCP 8-bit floating point specification (no infinities): steps of an eighth of the power of two."""

    name: CodecName = "fp8"
    top = 448.0

    # Scaled by 2**-120, an E4M3 number has its exponent and mantissa where float32 has them, subnormal ones included.

    def pack(self, values: Float32) -> Codes:
        """See Code."""
        values *= np.float32(2.0**-120)
        bits = values.view(np.uint32)
        sign = (bits >> 24).astype(np.uint8)
        sign &= 0x80
        bits &= 0x7FFFFFFF
        odd = bits >> 20
        odd &= 1
        bits += odd
        bits += 0x7FFFF  # with `odd`: to nearest, ties to even
        bits >>= 20
        codes = bits.astype(np.uint8)
        codes |= sign
        return codes

    def unpack(self, codes: Codes) -> Float32:
        """See Code."""
        bits = codes.view(np.int8).astype(np.int32)
        bits <<= 20
        bits &= np.int32(-0x78100000)  # the sign, four bits of exponent and three of mantissa
        values = bits.view(np.float32)
        values *= np.float32(2.0**120)
        return values


class Sections(NamedTuple):
    """The encoding of a run, cut up."""

    scales: npt.NDArray[np.float32]  # [lossy parts, blocks, 1, heads, 1, 2, 1]
    codes: Codes  # [lossy parts, blocks, outer, heads, middle, 2, inner]
    exact: npt.NDArray[np.uint8]  # [exact parts, part_bytes]


class QuantisedCodec:
    """A `WireCodec` of one-byte codes. Only for shapes whose heads are known."""

    lossless = False

    def __init__(self, code: Code) -> None:
        self._code = code

    @property
    def name(self) -> CodecName:
        """See WireCodec."""
        return self._code.name

    def encode(self, parts: memoryview, part_bytes: int, shape: PartShape) -> Encoded | None:
        """See WireCodec."""
        if not shape.heads:
            return None
        bits = _elements(parts, shape)
        tops = peaks(bits, _REDUCED, shape.dtype)
        lossy = ((tops == 0) | ((tops >= LEAST) & (tops <= MOST))).all(axis=(1, 2, 3, 4, 5, 6))
        if not lossy.any():
            return None
        size = _size(lossy, part_bytes, shape)
        if size >= len(parts):
            return None
        out = bytearray(size)
        head = _bitmap_bytes(len(lossy))
        out[:head] = np.packbits(~lossy, bitorder="little").tobytes()
        scales, codes, exact = _sections(memoryview(out)[head:], lossy, part_bytes, shape)
        scales[:] = tops[lossy] / np.float32(self._code.top)
        inverse = np.divide(np.float32(1), scales, where=scales != 0, out=np.zeros_like(scales))
        for step, chosen in _steps(lossy, part_bytes):
            values = to_float32(bits[chosen], shape.dtype)
            values *= inverse[step]
            codes[step] = self._code.pack(values)
        exact[:] = np.frombuffer(parts, np.uint8).reshape(len(lossy), part_bytes)[~lossy]
        return out

    def decode(self, encoded: memoryview, into: memoryview, part_bytes: int, shape: PartShape) -> int:
        """See WireCodec."""
        if not shape.heads:
            raise ProtocolError(f"a {self.name} run of parts whose heads are not known")
        bits = _elements(into, shape)
        head = _bitmap_bytes(len(bits))
        if len(encoded) < head:
            raise ProtocolError(f"a {self.name} run of {len(encoded)} bytes")
        marks = np.frombuffer(encoded[:head], np.uint8)
        lossy = np.unpackbits(marks, bitorder="little")[: len(bits)] == 0
        if len(encoded) != _size(lossy, part_bytes, shape):
            raise ProtocolError(f"a {self.name} run of {len(encoded)} bytes with {lossy.sum()} of {len(bits)} parts")
        scales, codes, exact = _sections(encoded[head:], lossy, part_bytes, shape)
        if not ((scales >= 0) & (scales <= MOST)).all():
            raise ProtocolError(f"a {self.name} run with a scale of {scales.max()}")
        for step, chosen in _steps(lossy, part_bytes):
            values = self._code.unpack(codes[step])
            values *= scales[step]
            bits[chosen] = from_float32(values, shape.dtype)
        np.frombuffer(into, np.uint8).reshape(len(bits), part_bytes)[~lossy] = exact
        return int.from_bytes(np.packbits(lossy, bitorder="little").tobytes(), "little")


def _elements(run: memoryview, shape: PartShape) -> Array:
    """The bits of a run's elements, `[parts, blocks, outer, heads, middle, 2, inner]`; a view."""
    axes = (-1, shape.blocks, shape.outer, shape.heads, shape.middle, 2, shape.inner)
    return np.frombuffer(run, bits_dtype(shape.dtype)).reshape(axes)


def _bitmap_bytes(parts: int) -> int:
    return (parts + 7) // 8


def _size(lossy: npt.NDArray[np.bool_], part_bytes: int, shape: PartShape) -> int:
    """Bytes of the encoding of a run."""
    count = int(lossy.sum())
    coded = count * (shape.scales * 4 + part_bytes // shape.item_bytes)
    return _bitmap_bytes(len(lossy)) + coded + (len(lossy) - count) * part_bytes


def _sections(body: memoryview, lossy: npt.NDArray[np.bool_], part_bytes: int, shape: PartShape) -> Sections:
    """What follows the bitmap; views."""
    count = int(lossy.sum())
    coded = count * shape.scales * 4
    exact = coded + count * (part_bytes // shape.item_bytes)
    return Sections(
        np.frombuffer(body[:coded], "<f4").reshape(count, shape.blocks, 1, shape.heads, 1, 2, 1),
        np.frombuffer(body[coded:exact], np.uint8).reshape(
            count, shape.blocks, shape.outer, shape.heads, shape.middle, 2, shape.inner
        ),
        np.frombuffer(body[exact:], np.uint8).reshape(-1, part_bytes),
    )


def _steps(lossy: npt.NDArray[np.bool_], part_bytes: int) -> Iterator[tuple[slice, npt.NDArray[np.intp]]]:
    """Cuts the lossy parts into steps: their places among themselves, and in the run."""
    places = np.flatnonzero(lossy)
    stride = max(1, STEP_BYTES // part_bytes)
    for start in range(0, len(places), stride):
        yield slice(start, start + stride), places[start : start + stride]
