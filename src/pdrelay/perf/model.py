"""KV bytes of a model, computed from its Hugging Face `config.json`.

A request's KV grows with its length in full-attention layers (GQA, MLA, compressed sparse attention), stops growing at
the window in sliding-window layers, and is one fixed state in linear-attention layers (Lightning, GDN, KDA). Sizes are
of one request over all layers and all shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdrelay.errors import ConfigError
from pdrelay.perf.layers import layer_kinds

DTYPE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0,
    "fp4": 0.5,
}  # fmt: skip


class Dtypes(NamedTuple):
    """How KV is stored. `indexer` is the sparse indexer's keys, `state` the linear layers' recurrent state."""

    kv: str = "bfloat16"
    indexer: str = ""  # like `kv` when empty
    state: str = "float32"

    def bytes_of(self, part: str) -> float:
        """Bytes of one element of `kv`, `indexer` or `state`. Raises ConfigError for an unknown dtype."""
        name = getattr(self, part) or self.kv
        if name not in DTYPE_BYTES:
            raise ConfigError(f"dtype: found {name!r}, expected one of {', '.join(DTYPE_BYTES)}")
        return DTYPE_BYTES[name]


class ModelKv(NamedTuple):
    """KV of one model in bytes."""

    per_token: float  # of the layers that grow for ever
    window_per_token: float  # of sliding-window layers, for each token inside the window
    window: int  # tokens
    state: float  # of linear layers, whatever the length
    layers: Mapping[str, int]  # kind to number

    @property
    def fixed(self) -> float:
        """Bytes of a long request that do not depend on its length."""
        return self.state + self.window_per_token * self.window

    def bytes_for(self, tokens: int) -> float:
        """KV of one request of `tokens` tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        return self.state + self.per_token * tokens + self.window_per_token * min(tokens, self.window)


def kv_of(config: Mapping[str, Any], dtypes: Dtypes | None = None) -> ModelKv:
    """KV of the model that `config` (a parsed config.json) describes; nested `text_config` is looked into.

    `dtypes` defaults to the config's own dtype with a float32 linear state. Raises ConfigError naming the missing key.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    stored = dtypes or Dtypes(kv=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"))
    kinds = Counter(layer_kinds(text))
    per_token = sum(number * _growing(kind, text, stored) for kind, number in kinds.items())
    windowed = kinds["sliding"] * _sliding(text, stored) if kinds["sliding"] else 0.0
    state = kinds["linear"] * _linear_state(text, stored) if kinds["linear"] else 0.0
    window = int(text.get("sliding_window") or 0)
    compressed = kinds["compressed"] + kinds["heavily_compressed"] + kinds["windowed_only"]
    if compressed:  # DeepSeek-V4 keeps the last tokens uncompressed in every layer
        windowed += compressed * _need(text, "head_dim") * stored.bytes_of("kv")
    return ModelKv(per_token, windowed if window else 0.0, window, state, dict(kinds))


def _growing(kind: str, text: Mapping[str, Any], stored: Dtypes) -> float:
    """Bytes that one layer adds with each token."""
    if kind == "full":
        return _full(text, stored)
    if kind == "compressed":  # DeepSeek-V4 CSA: one latent and one index key for every few tokens
        rate = _rate(text, "compressed_sparse_attention", 4)
        index = float(text.get("index_head_dim", 0)) * stored.bytes_of("indexer")
        return (_need(text, "head_dim") * stored.bytes_of("kv") + index) / rate
    if kind == "heavily_compressed":  # DeepSeek-V4 HCA
        return _need(text, "head_dim") * stored.bytes_of("kv") / _rate(text, "heavily_compressed_attention", 128)
    return 0.0


def _full(text: Mapping[str, Any], stored: Dtypes) -> float:
    """MLA keeps one latent and one rotary key for all heads, GQA a key and a value for each KV head."""
    index = float(text.get("index_head_dim") or 0) * stored.bytes_of("indexer")
    if text.get("kv_lora_rank"):
        latent = _need(text, "kv_lora_rank") + _need(text, "qk_rope_head_dim")
        return latent * stored.bytes_of("kv") + index
    heads = text.get("num_key_value_heads") or _need(text, "num_attention_heads")
    return float(heads) * _key_and_value(text) * stored.bytes_of("kv") + index


def _key_and_value(text: Mapping[str, Any], prefix: str = "") -> float:
    head = text.get(f"{prefix}head_dim") or text.get("head_dim")
    if not head:
        head = _need(text, "hidden_size") / _need(text, "num_attention_heads")
    return float(head) + float(text.get(f"{prefix}v_head_dim") or text.get("v_head_dim") or head)


def _sliding(text: Mapping[str, Any], stored: Dtypes) -> float:
    """Bytes of one token in one sliding-window layer, which may have heads of its own (MiMo)."""
    heads = text.get("swa_num_key_value_heads") or text.get("num_key_value_heads") or _need(text, "num_attention_heads")
    return float(heads) * _key_and_value(text, "swa_") * stored.bytes_of("kv")


def _linear_state(text: Mapping[str, Any], stored: Dtypes) -> float:
    """Recurrent state and convolution tail of one linear layer.

    The state is heads * key size * value size; the tail is the last kernel - 1 inputs of the short convolution.
    """
    linear: Mapping[str, Any] = text.get("linear_attn_config") or {}
    heads = (
        text.get("linear_num_value_heads")
        or linear.get("num_heads")
        or text.get("linear_num_heads")
        or _need(text, "num_attention_heads")
    )
    size = linear.get("head_dim") or text.get("linear_head_dim") or text.get("head_dim")
    key = text.get("linear_key_head_dim") or size or _need(text, "head_dim")
    value = text.get("linear_value_head_dim") or size or _need(text, "head_dim")
    state = float(heads) * float(key) * float(value) * stored.bytes_of("state")
    kernel = text.get("linear_conv_kernel_dim") or linear.get("short_conv_kernel_size") or 0
    if not kernel:
        return state
    key_heads = float(text.get("linear_num_key_heads") or heads)
    channels = 2 * key_heads * float(key) + float(heads) * float(value)
    return state + channels * (float(kernel) - 1) * stored.bytes_of("kv")


def _rate(text: Mapping[str, Any], kind: str, default: int) -> float:
    return float((text.get("compress_rates") or {}).get(kind, default))


def _need(text: Mapping[str, Any], key: str) -> float:
    value = text.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"model config: {key}: found {value!r}, expected a number above 0")
    return float(value)
