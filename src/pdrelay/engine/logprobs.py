"""Log probabilities of consecutive tokens, as they travel from an engine to the gateway."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

CANDIDATE_BYTES = 8
"""Bytes of one candidate of a row: its id and its log probability."""

assert array("I").itemsize == array("f").itemsize == 4, "as on every platform that vLLM runs on"


class Row(NamedTuple):
    """One position: the token that is there, then the likeliest ones in falling order, the token perhaps among them."""

    ids: Sequence[int]
    values: Sequence[float]
    rank: int  # of the token that is there; 1 is the likeliest


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Rows of equal width, packed: JSON-like numbers would be three times as large.

    `ids` and `ranks` are uint32, `values` float32, all little-endian; `ids` and `values` have shape [rows, width].
    """

    width: int
    ids: bytes
    values: bytes
    ranks: bytes

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __getitem__(self, part: slice) -> Logprobs:
        """Some of the rows; steps are not supported."""
        start, stop, step = part.indices(len(self))
        assert step == 1
        row = 4 * self.width
        return Logprobs(
            self.width,
            self.ids[row * start : row * stop],
            self.values[row * start : row * stop],
            self.ranks[4 * start : 4 * stop],
        )

    def rows(self) -> list[Row]:
        """All rows, unpacked."""
        ids, ranks, values = _integers(self.ids), _integers(self.ranks), array("f", self.values)
        if sys.byteorder == "big":
            values.byteswap()
        width = self.width
        return [
            Row(ids[i * width : (i + 1) * width], values[i * width : (i + 1) * width], rank)
            for i, rank in enumerate(ranks)
        ]


def pack(rows: Iterable[Row]) -> Logprobs:
    """Packs rows of equal width."""
    ids, values, ranks, width = array("I"), array("f"), array("I"), 0
    for row in rows:
        assert width in (0, len(row.ids)), "rows of unequal width"
        width = len(row.ids)
        ids.extend(row.ids)
        values.extend(row.values)
        ranks.append(row.rank)
    if sys.byteorder == "big":
        for numbers in (ids, values, ranks):
            numbers.byteswap()
    return Logprobs(width, ids.tobytes(), values.tobytes(), ranks.tobytes())


def _integers(data: bytes) -> array[int]:
    numbers = array("I", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
