"""KV sizes from Hugging Face configs, against published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.perf.catalog import find_model, models
from pdrelay.perf.layers import layer_kinds
from pdrelay.perf.model import Dtypes, kv_of

GQA = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("MiniMax-M2.5", 253_952),  # 62 layers, 8 heads, 128
        ("Qwen3-235B", 192_512),  # 94 layers, 4 heads, 128
        ("SmolLM2-135M", 23_040),
        ("Ring-2.5-1T", 11_520),  # 10 MLA layers of 576
        ("GLM5", 78 * (576 + 128) * 2),  # MLA and the sparse indexer's keys
    ],
)
def test_sizes_of_published_models(name: str, per_token: float) -> None:
    assert find_model(name).kv().per_token == per_token


def test_deepseek_v4_agrees_with_the_figure_for_a_million_tokens() -> None:
    kv = find_model("DeepSeek-V4-pro").kv(Dtypes("bfloat16"))
    assert kv.per_token * 2**20 / 2**30 == pytest.approx(9.62, abs=0.01)  # GiB, vLLM's figure


def test_pdd_needs_more_than_180_gbps_without_the_decode_side_cache() -> None:
    kv = find_model("DeepSeek-V4-pro").kv()
    assert kv.per_token * 64_000 * 80 * 8 / 1e9 == pytest.approx(180, rel=0.05)


def test_prfaas_table_5_is_met_at_every_length() -> None:
    kv = find_model("PrfaaS-1T").kv()
    for tokens, mib in ((1024, 190.8), (8192, 308.9), (32_002, 701.3), (130_002, 2316.3)):
        assert kv.bytes_for(tokens) / 2**20 == pytest.approx(mib, rel=1e-3)


@pytest.mark.parametrize("name", [model.name for model in models()])
def test_prefill_times_implied_by_prfaas_table_3_rise_with_length(name: str) -> None:
    gbps = {
        "Kimi Linear": [1.19, 2.29, 3.87, 4.88],
        "MiMo-V2-Flash": [0.82, 2.85, 4.66, 4.71],
        "Qwen3.5-397B": [4.13, 6.28, 8.25, 7.47],
        "Ring-2.5-1T": [7.27, 4.47, 2.59, 1.46],
        "MiniMax-M2.5": [4.94, 32.87, 59.93, 47.82],
        "Qwen3-235B": [4.12, 22.42, 33.35, 21.50],
    }.get(name)
    if gbps is None:
        return
    kv = find_model(name).kv()
    times = [kv.bytes_for(n) * 8 / (rate * 1e9) for n, rate in zip((1024, 8192, 32768, 131072), gbps, strict=True)]
    # Eight H200 take a third to half a second for the least prompt whatever the model: the sizes are right.
    assert 0.3 < times[0] < 0.5
    assert times == sorted(times)


def test_a_window_stops_growing_and_a_state_does_not_grow() -> None:
    mimo, kimi = find_model("MiMo-V2-Flash").kv(), find_model("Kimi Linear").kv()
    assert mimo.bytes_for(1128) - mimo.bytes_for(1000) == pytest.approx(128 * mimo.per_token)
    assert mimo.bytes_for(64) == 64 * (mimo.per_token + mimo.window_per_token)
    assert kimi.bytes_for(1) == pytest.approx(kimi.state + kimi.per_token)
    assert kimi.state > 20 * 32 * 128 * 128 * 4


@given(dtype=st.sampled_from(["float32", "bfloat16", "fp8"]), layers=st.integers(1, 100), heads=st.integers(1, 16))
def test_gqa_is_linear_in_layers_heads_and_bytes(dtype: str, layers: int, heads: int) -> None:
    kv = kv_of(GQA | {"num_hidden_layers": layers, "num_key_value_heads": heads}, Dtypes(dtype))
    assert kv.per_token == layers * heads * 2 * 8 * {"float32": 4, "bfloat16": 2, "fp8": 1}[dtype]


def test_the_configs_own_dtype_is_the_default() -> None:
    assert kv_of(GQA | {"torch_dtype": "float32"}).per_token == 2 * kv_of(GQA).per_token
    assert kv_of({"text_config": GQA | {"dtype": "float32"}}).per_token == 2 * kv_of(GQA).per_token


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({}, "ffff"),
        ({"layer_types": ["full_attention", "sliding_attention", "linear_attention", "full_attention"]}, "fslf"),
        ({"full_attention_interval": 4}, "lllf"),
        ({"layer_group_size": 3}, "llff"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0]}, "fssf"),
        ({"attn_type_list": [0, 0, 0, 1]}, "lllf"),
        ({"linear_attn_config": {"full_attn_layers": [2]}}, "lfll"),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, "sfsf"),
        ({"sliding_window": 8}, "ssss"),
        ({"sliding_window": 8, "use_sliding_window": False}, "ffff"),
        ({"compress_ratios": [128, 4, 0, 4]}, "hcwc"),
    ],
)
def test_layers_in_every_spelling(keys: dict[str, object], kinds: str) -> None:
    assert "".join(kind[0] for kind in layer_kinds(GQA | keys)) == kinds


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers: found None, expected at least 1"),
        ({"num_hidden_layers": 2}, "num_attention_heads: found None, expected a number above 0"),
        (GQA | {"layer_types": ["full_attention"] * 3}, "layer_types: found 3 layers, expected num_hidden_layers, 4"),
        (GQA | {"layer_types": ["mamba"] * 4}, "layer_types: found 'mamba', expected some of full_attention"),
        (GQA | {"compress_ratios": [7] * 4}, "compress_ratios: found 7, expected 0, 4 or 128"),
        (GQA | {"dtype": "int3"}, "dtype: found 'int3', expected one of float32"),
    ],
)
def test_a_config_that_does_not_say_enough_is_one_clear_error(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_of(config)
