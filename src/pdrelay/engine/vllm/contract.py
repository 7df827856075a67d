"""The KV contract of a vLLM engine, and which engines we refuse to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ConfigError
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import UNIT_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def contract_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> KVContract:
    """How this engine stores its pages; a page is one engine block. Raises ConfigError for what we cannot move."""
    _require_one_rank(vllm_config)
    spec = _only_spec(kv_cache_config)
    if spec.block_size % UNIT_TOKENS:
        raise ConfigError(f"--block-size: found {spec.block_size}, expected a multiple of {UNIT_TOKENS}")
    return KVContract(
        model=settings.model,
        revision=settings.revision,
        page_tokens=spec.block_size,
        block_tokens=spec.block_size,
        groups=(
            KVGroup(
                layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
                heads=spec.num_kv_heads,
                head_size=spec.head_size,
                dtype=str(spec.dtype).removeprefix("torch."),
                part_bytes=spec.page_size_bytes,
                codec=_codec(vllm_config, kv_cache_config, spec),
            ),
        ),
    )


def _require_one_rank(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        raise ConfigError(
            "tensor and pipeline parallel engines: "
            f"found {parallel.world_size} ranks, expected one (shards of a page are not supported yet)"
        )


def _only_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec if len(kinds) == 1 else None
    # MLA and other relatives are subclasses with layouts of their own.
    if spec is None or type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        raise ConfigError(
            f"KV cache groups of this model: found {', '.join(kinds) or 'none'}, "
            "expected a single group of full attention"
        )
    return spec


def _codec(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: FullAttentionSpec) -> str:
    """Byte layout of a part. CPU attention packs keys for an instruction set, so that belongs to it."""
    device = vllm_config.device_config.device_type
    layout = kv_cache_config.kv_cache_layout or "default"
    if device != "cpu":
        return f"vllm-{device}/{layout}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"vllm-cpu/{layout}/{isa}"
