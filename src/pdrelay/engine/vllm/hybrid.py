"""vLLM's scheduler for models with several KV groups whose pages travel.

Stock vLLM takes a local prefix only as far as all groups have it. Here the depot fills the gap: whole pages of growing
groups are used where they are, and windows and states, small and needed at one place only, come from the depot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import is_full_attention_spec

from pdrelay.engine.vllm.connector import PdrelayConnector

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

LocalHit = tuple["KVCacheBlocks", int, int, bool]
"""Blocks, tokens, the end of a prefix that some groups have and others lack, whether groups differ in length."""


class HybridScheduling(Scheduler):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Looks for local prefixes group by group, and stops prefill where a state must be published."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._aligns_states: bool = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split: bool = self.has_mamba_layers  # so that vLLM asks where a chunk ends

    def _get_local_prefix_cache_hit(self, request: Request) -> LocalHit:
        """A hit that growing groups have and others lack counts only if the connector then has tokens beyond it."""
        manager = self.kv_cache_manager
        blocks, tokens, boundary = manager.get_computed_blocks(request)
        coordinator = manager.coordinator
        if not isinstance(self.connector, PdrelayConnector) or not isinstance(coordinator, HybridKVCacheCoordinator):
            return blocks, tokens, boundary, False
        if coordinator.full_attention_group_id is None or not manager.prefix_cache_lookup_enabled(request):
            return blocks, tokens, boundary, False
        # A hit of all but the last token would leave the connector no token to bring a state or window with.
        longest = self._hit_of_growing_groups(request, request.num_tokens - 2)
        if longest is not None and longest[1] > tokens:
            return *longest, 0, True
        return blocks, tokens, boundary, False

    def _hit_of_growing_groups(self, request: Request, limit: int) -> tuple[KVCacheBlocks, int] | None:
        """None when they differ, or when another group has more than they."""
        manager = self.kv_cache_manager
        blocks, hits = manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, limit)
        groups = manager.kv_cache_config.kv_cache_groups
        growing = {hit for hit, group in zip(hits, groups, strict=True) if is_full_attention_spec(group.kv_cache_spec)}
        if len(growing) != 1 or max(hits) > max(growing):
            return None
        return manager.create_kv_cache_blocks(blocks), max(growing)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start: int = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if self._aligns_states:
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        if not isinstance(self.connector, PdrelayConnector):
            return num_new_tokens
        return self.connector.scheduler_side.chunk_end(request, start, start + num_new_tokens) - start
