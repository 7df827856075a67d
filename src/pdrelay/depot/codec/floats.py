"""Floating-point dtypes as arrays of their bits. Whole arrays at once, and without the GIL: numpy's own integer loops
release it, conversions of foreign dtypes do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.unsignedinteger[Any]]
Float32 = npt.NDArray[np.float32]


def bits_dtype(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Unsigned integers as wide as `dtype`'s elements."""
    return np.dtype("<u4" if dtype == "float32" else "<u2")


def peaks(bits: Array, axes: tuple[int, ...], dtype: str) -> Float32:
    """Largest magnitude along `axes`, which are kept; infinite or NaN where an element is."""
    # Without their sign, floats are in the same order as their bits.
    magnitude = bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return to_float32(magnitude.max(axis=axes, keepdims=True), dtype)


def to_float32(bits: Array, dtype: str) -> Float32:
    """The values, in an array of their own."""
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    native = np.float32 if dtype == "float32" else np.float16
    return bits.view(native).astype(np.float32)


def from_float32(values: Float32, dtype: str) -> Array:
    """Bits of the values, rounded to nearest; overwrites `values`."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):  # what no codec of ours made
            return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    wide += 0x8000  # half of what is cut off; ties away from zero
    wide >>= 16
    return wide.astype(np.uint16)
