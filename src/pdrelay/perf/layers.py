"""Which kind of attention each layer of a model has, from its Hugging Face config.

Kinds: `full` (GQA, MLA, with or without a sparse indexer), `sliding`, `linear`, and DeepSeek-V4's `compressed` and
`heavily_compressed`, with `windowed_only` for its layers that compress nothing. Every family spells this its own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrelay.errors import ConfigError

_NAMED = {
    "full_attention": "full",
    "deepseek_sparse_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "heavily_compressed",
}
_COMPRESSED = {0: "windowed_only", 4: "compressed", 128: "heavily_compressed"}


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """The kind of every layer. Raises ConfigError for a kind that is not known."""
    count = text.get("num_hidden_layers")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"model config: num_hidden_layers: found {count!r}, expected at least 1")
    for spelling in (_listed, _compress_ratios, _pattern, _linear_config, _intervals):
        kinds = spelling(text, count)
        if kinds is not None:
            return kinds
    return ["full"] * count


def _listed(text: Mapping[str, Any], count: int) -> list[str] | None:
    names = text.get("layer_types")
    if not names:
        return None
    unknown = [name for name in names if name not in _NAMED]
    if unknown:
        raise ConfigError(f"model config: layer_types: found {unknown[0]!r}, expected some of {', '.join(_NAMED)}")
    if len(names) != count:
        raise ConfigError(f"model config: layer_types: found {len(names)} layers, expected num_hidden_layers, {count}")
    return [_NAMED[name] for name in names]


def _compress_ratios(text: Mapping[str, Any], count: int) -> list[str] | None:
    """DeepSeek-V4: one compression ratio a layer."""
    ratios = text.get("compress_ratios")
    if not ratios:
        return None
    unknown = [ratio for ratio in ratios[:count] if ratio not in _COMPRESSED]
    if unknown:
        raise ConfigError(f"model config: compress_ratios: found {unknown[0]!r}, expected 0, 4 or 128")
    return [_COMPRESSED[ratio] for ratio in ratios[:count]]


def _pattern(text: Mapping[str, Any], count: int) -> list[str] | None:
    """MiMo (`hybrid_layer_pattern`, 1 slides) and MiniMax-01 (`attn_type_list`, 0 is linear)."""
    if pattern := text.get("hybrid_layer_pattern"):
        return ["sliding" if slides else "full" for slides in pattern[:count]]
    if kinds := text.get("attn_type_list"):
        return ["full" if full else "linear" for full in kinds[:count]]
    return None


def _linear_config(text: Mapping[str, Any], count: int) -> list[str] | None:
    """Kimi Linear: layers are numbered from 1."""
    linear = text.get("linear_attn_config")
    if not linear:
        return None
    full = set(linear.get("full_attn_layers") or ())
    return ["full" if number in full else "linear" for number in range(1, count + 1)]


def _intervals(text: Mapping[str, Any], count: int) -> list[str] | None:
    """Every nth layer is full: linear before it (Qwen3-Next, Ring), or sliding (Gemma)."""
    linear = text.get("full_attention_interval") or text.get("layer_group_size")
    if linear:
        whole = count // linear * linear  # a last group that is not whole is full attention (Ring)
        return ["full" if (i + 1) % linear == 0 or i >= whole else "linear" for i in range(count)]
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        every = text.get("sliding_window_pattern") or 0
        return ["full" if every and (i + 1) % every == 0 else "sliding" for i in range(count)]
    return None
