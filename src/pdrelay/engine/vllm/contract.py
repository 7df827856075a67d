"""The KV contract of a vLLM engine, and which engines we refuse to serve.

Refusals name what was found, what is expected and where: docs/models.md lists them.
"""

from __future__ import annotations

from math import gcd, lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
)

from pdrelay.engine.vllm.groups import EngineGroup, LayerOf, Plan
from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ConfigError
from pdrelay.kv.contract import Kind, KVContract, KVGroup
from pdrelay.kv.names import UNIT_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_ORDER: tuple[Kind, ...] = ("full_attention", "mla", "sliding_window", "linear_state")
"""Groups that need every page come first: group 0 is what prefix hits are counted by."""

_KINDS: dict[type[KVCacheSpec], Kind] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    MambaSpec: "linear_state",
}
"""By exact class: vLLM's other specs are subclasses with layouts of their own."""


class Storage(NamedTuple):
    """How a layer keeps its KV. Layers with equal storage are one group."""

    kind: Kind
    heads: int
    head_size: int
    dtype: str
    window: int
    codec: str
    block_tokens: int
    block_bytes: int  # on one rank
    copies: int  # ranks that keep the same
    divisible: bool  # a rank's block can be cut into more shares


def plan_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> Plan:
    """How this engine stores its pages. Raises ConfigError for what we cannot move."""
    _require_tensor_parallel_only(vllm_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    found: dict[Storage, list[LayerOf]] = {}
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in _specs(group):
            storage = _Reader(vllm_config, kv_cache_config, name).storage(spec)
            found.setdefault(storage, []).append(LayerOf(name, table))
    for layers in found.values():
        layers.sort(key=lambda layer: (extract_layer_index(layer.name), layer.name))
    storages = sorted(found, key=lambda at: (_ORDER.index(at.kind), extract_layer_index(found[at][0].name)))
    page_tokens = _page_tokens(storages, vllm_config.cache_config.mamba_cache_mode == "align")
    _require_whole_hits(kv_cache_config, page_tokens)
    shards = _shards(storages, ranks, settings.shards)
    attention = [storage.block_tokens for storage in storages if storage.kind != "linear_state"]
    contract = KVContract(
        model=settings.model,
        revision=settings.revision,
        page_tokens=page_tokens,
        block_tokens=gcd(*attention) if attention else page_tokens,
        shards=shards,
        groups=tuple(_group(storage, len(found[storage]), page_tokens, ranks, shards) for storage in storages),
    )
    return Plan(contract, tuple(_engine_group(storage, found[storage], ranks) for storage in storages))


def _group(storage: Storage, layers: int, page_tokens: int, ranks: int, shards: int) -> KVGroup:
    blocks = 1 if storage.kind == "linear_state" else page_tokens // storage.block_tokens
    return KVGroup(
        kind=storage.kind,
        layers=layers,
        heads=storage.heads,
        head_size=storage.head_size,
        dtype=storage.dtype,
        window=storage.window,
        part_bytes=blocks * storage.block_bytes * (ranks // storage.copies) // shards,
        codec=storage.codec,
    )


def _engine_group(storage: Storage, layers: list[LayerOf], ranks: int) -> EngineGroup:
    return EngineGroup(
        layers=tuple(layers),
        block_tokens=storage.block_tokens,
        block_bytes=storage.block_bytes,
        ranks=ranks,
        copies=storage.copies,
        is_state=storage.kind == "linear_state",
    )


def _require_tensor_parallel_only(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    others = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, found in others.items():
        if found != 1:
            raise ConfigError(f"{option}: found {found}, expected 1: only tensor-parallel ranks can exchange pages")


def _specs(group: KVCacheGroupSpec) -> list[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    if group.host_resident or not group.enable_kv_transfer:
        raise ConfigError(f"KV cache of {group.layer_names[0]}: found one outside the device's, expected none")
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [(name, spec.kv_cache_specs[name]) for name in group.layer_names]
    return [(name, spec) for name in group.layer_names]


def _page_tokens(storages: list[Storage], states_at_edges: bool) -> int:
    sizes = [at.block_tokens for at in storages if at.kind != "linear_state" or states_at_edges]
    tokens = lcm(*(sizes or [at.block_tokens for at in storages]))
    if tokens % UNIT_TOKENS:
        raise ConfigError(f"--block-size: found {tokens}, expected a multiple of {UNIT_TOKENS}")
    return tokens


def _require_whole_hits(kv_cache_config: KVCacheConfig, page_tokens: int) -> None:
    # Hits inside blocks make vLLM move blocks where nobody else sees it.
    found = kv_cache_config.cache_hit_alignment_tokens
    if found is not None and found % page_tokens:
        raise ConfigError(
            f"--prefix-match-unit: found hits at every {found} tokens, expected whole pages ({page_tokens})"
        )


def _shards(storages: list[Storage], ranks: int, wanted: int) -> int:
    shares = [ranks // at.copies for at in storages]
    shards = wanted or lcm(*shares)
    for at, count in zip(storages, shares, strict=True):
        if shards != count and (not at.divisible or shards % count or at.block_bytes * count % shards):
            expected = f"a multiple of {count}" if at.divisible else f"{count}"
            raise ConfigError(
                f"shards: found {shards}, expected {expected}: {ranks} tensor-parallel ranks keep {at.kind} "
                f"({at.codec}) in {count} shares"
            )
    return shards


class _Reader:
    """Reads the storage of one layer from its spec."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layer: str) -> None:
        self._config, self._layer = vllm_config, layer
        self._device = vllm_config.device_config.device_type
        self._layout = kv_cache_config.kv_cache_layout or "default"
        self._ranks: int = vllm_config.parallel_config.tensor_parallel_size

    def storage(self, spec: KVCacheSpec) -> Storage:
        """Raises ConfigError for what we cannot move."""
        kind = _KINDS.get(type(spec))
        if kind is None:
            raise self._refusal(type(spec).__name__, "full attention, a sliding window, MLA or a linear state")
        block_bytes = prod(compute_layer_kv_cache_shape_bytes(spec, 1))
        if isinstance(spec, MambaSpec):
            return self._state(spec, block_bytes)
        if spec.tokens_per_state != 1:
            raise self._refusal(f"{spec.tokens_per_state} tokens an entry", "one")
        window = spec.sliding_window or 0
        if kind == "full_attention" and (window or spec.attention_chunk_size):
            raise self._refusal(
                f"full attention with a window of {window or spec.attention_chunk_size} tokens",
                "vLLM's hybrid KV cache manager: remove --disable-hybrid-kv-cache-manager",
            )
        if kind == "sliding_window" and spec.extra_retained_tokens:
            raise self._refusal(f"{spec.extra_retained_tokens} tokens kept below the window", "none")
        copies = self._copies(spec)
        return Storage(
            kind=kind,
            heads=spec.num_kv_heads * (self._ranks // copies),
            head_size=spec.head_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            window=window,
            codec=self._codec(spec, kind),
            block_tokens=spec.block_size,
            block_bytes=block_bytes,
            copies=copies,
            divisible=kind == "mla" or self._layout.endswith("HNC"),
        )

    def _state(self, spec: MambaSpec, block_bytes: int) -> Storage:
        if spec.num_speculative_blocks:
            raise self._refusal(
                "speculative decoding on a linear state", "none: it keeps states that may be taken back"
            )
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        convolution = "DS" if is_conv_state_dim_first() else "SD"
        dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
        arrays = [f"{dtype}[{'x'.join(map(str, shape))}]" for dtype, shape in zip(dtypes, spec.shapes, strict=True)]
        return Storage(
            kind="linear_state",
            heads=1,
            head_size=0,
            dtype=dtypes[-1],
            window=0,
            codec="/".join((f"vllm-{self._device}", spec.mamba_type.name.lower(), convolution, *arrays)),
            block_tokens=spec.block_size,
            block_bytes=block_bytes,
            copies=self._ranks if spec.tp_replicated else 1,
            divisible=spec.tp_replicated,
        )

    def _copies(self, spec: FullAttentionSpec | SlidingWindowSpec) -> int:
        """vLLM tells of replicas only where heads share a latent; KV heads are copied when ranks outnumber them."""
        heads = self._config.model_config.get_total_num_kv_heads()
        limit: int = spec.max_tp_shards or (heads if spec.num_kv_heads == 1 else self._ranks)
        if self._ranks > limit and self._ranks % limit != 0:
            raise self._refusal(f"{limit} KV heads on {self._ranks} ranks", "a divisor of the ranks")
        return max(1, self._ranks // limit)

    def _codec(self, spec: FullAttentionSpec | SlidingWindowSpec, kind: Kind) -> str:
        """Byte layout of a part. CPU attention packs keys for an instruction set, so that belongs to it."""
        parts = [f"vllm-{self._device}", self._layout]
        if kind == "mla":
            parts += ["mla", spec.cache_dtype_str or "auto"]
        elif self._device == "cpu":
            parts.append(self._instruction_set(spec))
        if spec.kv_quant_mode is not KVQuantMode.NONE:
            parts.append(spec.kv_quant_mode.name.lower())
        return "/".join(parts)

    def _instruction_set(self, spec: FullAttentionSpec | SlidingWindowSpec) -> str:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype, cache_dtype = self._config.model_config.dtype, self._config.cache_config.cache_dtype
        isa: str = _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
        return isa

    def _refusal(self, found: str, expected: str) -> ConfigError:
        return ConfigError(f"KV cache of {self._layer}: found {found}, expected {expected}")
