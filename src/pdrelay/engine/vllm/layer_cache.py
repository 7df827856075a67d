"""One layer's KV cache on one rank, as the parts of pages see it.

Bytes in host memory are numpy arrays: a copy of some kilobytes costs a fifth of what it costs between torch's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pdrelay.engine.vllm.groups import EngineGroup, Plan, Share
from pdrelay.errors import ConfigError

Bytes = Any
"""A numpy array of uint8 in host memory, a tensor of uint8 on another device; both are copied by assignment."""


class LayerCache(NamedTuple):
    """Shares of one layer's blocks."""

    group: int
    table: int  # number of its block table
    slot: int  # place of that table among those of its group
    shares: Bytes  # `[blocks, shares kept here, bytes]`, a view of vLLM's cache
    first_part: int  # number in a page of the part that belongs to the first share
    part_bytes: int
    writes: bool  # this rank copies the layer out


def layer_caches(plan: Plan, rank: int, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, LayerCache]:
    """Views of the caches that vLLM registers, by layer. Raises ConfigError when a block is in pieces."""
    found: dict[str, LayerCache] = {}
    for number, (group, layout) in enumerate(zip(plan.groups, plan.contract.layouts, strict=True)):
        share = plan.share(number, rank)
        for index, (name, table) in enumerate(group.layers):
            if name not in kv_caches:
                raise ConfigError(f"KV cache: found none of {name}, expected {len(group.layers)} layers of its kind")
            shares = _shares(name, kv_caches[name], group, share)
            first = index * plan.contract.shards + share.first
            slot = group.tables.index(table)
            found[name] = LayerCache(number, table, slot, shares, first, layout.part_bytes, share.writes)
    return found


def arena_bytes(arena: memoryview, device: torch.device) -> Bytes:
    """The whole arena, to copy from and to caches on `device`."""
    if device.type == "cpu":
        return np.frombuffer(arena, dtype=np.uint8)
    # Read-only mappings cannot be tensors without a warning; the arena is writable by contract.
    return torch.frombuffer(arena, dtype=torch.uint8)


def in_memory(data: Bytes) -> Bytes:
    """A stretch of the arena as a numpy array."""
    return data if isinstance(data, np.ndarray) else data.numpy()


def _shares(name: str, cache: torch.Tensor, group: EngineGroup, share: Share) -> Bytes:
    kernel_bytes = cache[0].nbytes
    split = group.block_bytes // kernel_bytes  # kernels may see a block as several
    whole = cache[0].is_contiguous() and split * kernel_bytes == group.block_bytes
    if not whole or (split > 1 and (share.parts > 1 or cache.stride(0) * cache.element_size() != kernel_bytes)):
        raise ConfigError(
            f"KV cache of {name}: found {kernel_bytes} bytes a block with strides {cache.stride()}, "
            f"expected {group.block_bytes} in one run"
        )
    raw = cache.view(torch.uint8)
    size = group.block_bytes // share.parts
    shares = raw.as_strided(
        (len(cache) // split, share.parts, size), (raw.stride(0) * split, size, 1), raw.storage_offset()
    )
    return shares.numpy() if shares.device.type == "cpu" else shares
