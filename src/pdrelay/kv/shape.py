"""Where heads, keys and values lie inside a part, for codecs that scale each head on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pdrelay.kv.contract import KVGroup

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element of the floating-point dtypes that engines keep KV in."""


class PartShape(NamedTuple):
    """A part as an array `[blocks, outer, heads, middle, 2, inner]` of `dtype`; the axis of length 2 is keys, values.

    `heads` is 0 where that is not known: then only codecs that keep every bit may touch the part.
    """

    dtype: str
    blocks: int = 1
    outer: int = 1
    heads: int = 0
    middle: int = 1
    inner: int = 1

    @property
    def scales(self) -> int:
        """How many scales a part has: for the keys and the values of each head in each block."""
        return self.blocks * self.heads * 2

    @property
    def elements(self) -> int:
        """Elements of a part; 0 where heads are not known."""
        return self.blocks * self.outer * self.heads * self.middle * 2 * self.inner

    @property
    def item_bytes(self) -> int:
        """Bytes of an element; 1 where the dtype is not a floating-point one that we know."""
        return ITEM_BYTES.get(self.dtype, 1)


def part_shape(group: KVGroup, page_tokens: int, block_tokens: int, shards: int) -> PartShape:
    """The shape of the parts of `group`, as far as its codec tells.

    A part is the engine blocks of a page one after the other. vLLM keeps a layer's block as heads, tokens, contents
    (`LBHNC`) or tokens, heads, contents (`LBNHC`), with a token's key and value side by side. Its CPU attention packs
    keys for an instruction set, but only within a head and block, all keys before all values. The blocks of a group may
    be some times as large as `block_tokens`: then every chunk of the last axes is still one head's keys or values.
    """
    unknown = PartShape(group.dtype)
    engine, _, layout = group.codec.partition("/")
    if group.kind not in ("full_attention", "sliding_window"):
        return unknown
    blocks, head_size = page_tokens // block_tokens, group.head_size
    heads = max(1, group.heads // shards)  # more shards than heads: each has a copy of one
    if engine == "vllm-cpu" and layout.startswith("LBHNC/"):
        shape = PartShape(group.dtype, blocks, 1, heads, 1, block_tokens * head_size)
    elif engine.startswith("vllm-") and layout == "LBHNC":
        shape = PartShape(group.dtype, blocks, 1, heads, block_tokens, head_size)
    elif engine.startswith("vllm-") and layout == "LBNHC":
        shape = PartShape(group.dtype, blocks, block_tokens, heads, 1, head_size)
    else:
        return unknown
    return shape if shape.elements * ITEM_BYTES.get(group.dtype, 0) == group.part_bytes else unknown
