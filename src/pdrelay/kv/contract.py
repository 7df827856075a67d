"""The KV contract: what an engine's copies look like, and whether two engines can exchange them.

Names say what KV means; the contract says how this engine stores it. Peers compare contracts before a byte moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from pdrelay.errors import ContractError
from pdrelay.kv.names import group_of
from pdrelay.kv.shape import PartShape, part_shape

Kind = Literal["full_attention", "sliding_window", "mla", "linear_state"]


class Layout(NamedTuple):
    """The shape of a page: `parts` parts of `part_bytes` bytes, one after the other."""

    parts: int
    part_bytes: int
    shape: PartShape = PartShape("")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.parts * self.part_bytes


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a model that keep their KV alike.

    A page of a group is `layers * shards` parts in layer-major order; every part has `part_bytes` bytes. Part
    `layer * shards + shard` is the share of one tensor-parallel shard in one layer. `codec` names the byte layout
    inside a part, with the instruction set where the layout depends on it, for example `vllm-cpu/LBHNC/amx`;
    `emulated` for emulated engines.
    """

    kind: Kind = "full_attention"
    layers: int
    heads: int  # KV heads of the whole model; 1 where heads share a latent or a state
    head_size: int  # elements a head and token; of the latent for MLA, 0 for a state
    dtype: str
    window: int = 0  # tokens that a token sees, itself included; sliding windows only
    part_bytes: int
    codec: str


class KVContract(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stores its pages: one page for each group and run of `page_tokens` tokens.

    A page is a whole number of engine blocks of `block_tokens` tokens. A page of group g is called `in_group(name, g)`.
    """

    model: str
    revision: str
    page_tokens: int
    block_tokens: int
    shards: int = 1  # tensor-parallel shares that a layer's KV is stored in
    groups: tuple[KVGroup, ...]

    def layout_of(self, name: bytes) -> Layout:
        """The shape of page `name`. Raises ContractError for a group that the model does not have."""
        group = group_of(name)
        if group >= len(self.groups):
            raise ContractError("groups", len(self.groups), f"a page of group {group}")
        return self._layout(self.groups[group])

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The shapes of pages, by group."""
        return tuple(self._layout(group) for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of every group."""
        return sum(layout.page_bytes for layout in self.layouts)

    @property
    def bytes_per_token(self) -> float:
        """KV bytes that one more token of a long prompt adds."""
        growing = [g for g in self.groups if g.kind in ("full_attention", "mla")]
        return sum(self._layout(group).page_bytes for group in growing) / self.page_tokens

    def require_equal(self, other: KVContract) -> None:
        """Raises ContractError naming the first field that differs, such as `groups[1].codec`."""
        for field, ours, theirs in _differences(self, other):
            raise ContractError(field, ours, theirs)

    def _layout(self, group: KVGroup) -> Layout:
        shape = part_shape(group, self.page_tokens, self.block_tokens, self.shards)
        return Layout(group.layers * self.shards, group.part_bytes, shape)


def _differences(ours: msgspec.Struct, theirs: msgspec.Struct, at: str = "") -> Iterator[tuple[str, object, object]]:
    for field in ours.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine == other:
            continue
        if field != "groups":
            yield at + field, mine, other
        elif len(mine) != len(other):
            yield "groups", _kinds(mine), _kinds(other)
        else:
            for index, (a, b) in enumerate(zip(mine, other, strict=True)):
                yield from _differences(a, b, f"groups[{index}].")


def _kinds(groups: tuple[KVGroup, ...]) -> str:
    return ", ".join(group.kind for group in groups)
