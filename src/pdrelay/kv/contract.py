"""The KV contract: what an engine's copies look like, and whether two engines can exchange them.

Names say what KV means; the contract says how this engine stores it. Peers compare contracts before a byte moves.
"""

from __future__ import annotations

import msgspec

from pdrelay.errors import ContractError


class KVContract(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stores a page.

    A page is `layers * shards` parts in layer-major order; every part has `part_bytes` bytes.
    `codec` names the byte layout inside a part, with the instruction set where the layout depends on it,
    for example `vllm-cpu/LBHNC/amx`; `emulated` for emulated engines.
    """

    model: str
    revision: str
    kind: str = "full_attention"  # the KV group's attention kind
    layers: int
    shards: int = 1  # tensor-parallel shards
    heads: int  # KV heads of the whole model
    head_size: int
    dtype: str
    page_tokens: int
    part_bytes: int
    codec: str

    @property
    def parts(self) -> int:
        """Parts of one page."""
        return self.layers * self.shards

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, partly filled ones included."""
        return self.parts * self.part_bytes

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token."""
        return self.page_bytes / self.page_tokens

    def require_equal(self, other: KVContract) -> None:
        """Raises ContractError naming the first field that differs."""
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise ContractError(field, ours, theirs)
