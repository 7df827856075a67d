"""How vLLM's KV cache groups become a contract, and what is refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import msgspec
import pytest

from pdrelay.engine.vllm.groups import Share
from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ConfigError, ContractError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from pdrelay.engine.vllm.contract import plan_of
    from pdrelay.engine.vllm.groups import Plan

pytestmark = pytest.mark.vllm

SETTINGS = Settings(instance="e", depot_socket="", model="m")


def full(block: int = 32, heads: int = 2, **changes: object) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, **changes)


def window(block: int = 32, heads: int = 2, **changes: object) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, sliding_window=128, **changes
    )


def latent(block: int = 32) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1, cache_dtype_str="auto"
    )


def state(block: int = 288, **changes: object) -> MambaSpec:
    fields = {"shapes": ((3, 512), (4, 64, 64)), "dtypes": (torch.bfloat16, torch.float32), "page_size_padded": 73728,
              "mamba_type": MambaAttentionBackendEnum.GDN_ATTN, "mamba_cache_mode": "align"}  # fmt: skip
    return MambaSpec(block_size=block, **(fields | changes))


def plan(*groups: tuple[KVCacheSpec, list[int]], ranks: int = 1, shards: int = 0, heads: int = 2, **changes) -> Plan:
    """The plan for vLLM's groups, each a spec and the numbers of its layers."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=changes.pop("pipeline", 1),
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="align", cache_dtype="auto"),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_total_num_kv_heads=lambda: heads),
    )  # fmt: skip
    vllm_groups = [KVCacheGroupSpec([f"layers.{i}.attn" for i in layers], spec) for spec, layers in groups]
    layout = changes.pop("layout", "LBHNC")
    cache = KVCacheConfig(8, [], vllm_groups, kv_cache_layout=layout, **changes)
    return plan_of(config, cache, msgspec.structs.replace(SETTINGS, shards=shards))


def test_layers_that_keep_their_kv_alike_are_one_group_whatever_their_block_tables() -> None:
    found = plan((window(), [0, 3]), (window(), [1, 4]), (full(), [2, 5]))
    first, second = found.contract.groups
    assert (first.kind, first.layers, first.window) == ("full_attention", 2, 0)
    assert (second.kind, second.layers, second.window) == ("sliding_window", 4, 128)
    assert [layer.name for layer in found.groups[1].layers] == [f"layers.{i}.attn" for i in (0, 1, 3, 4)]
    assert [layer.table for layer in found.groups[1].layers] == [0, 1, 0, 1]
    assert found.groups[1].tables == (0, 1)
    assert found.groups[0].blocks(([], [], [7, 8, 9]), 1, 32, 64) == ((8,),)
    assert found.groups[1].blocks(([0, 3], [0, 4], []), 1, 32, 64) == ((3,), (4,))


def test_a_state_keeps_its_pages_as_long_as_the_blocks_of_attention() -> None:
    found = plan((state(), [0]), (state(), [1]), (full(block=288), [3]))
    contract = found.contract
    assert (contract.page_tokens, [group.kind for group in contract.groups]) == (
        288,
        ["full_attention", "linear_state"],
    )
    assert contract.groups[1].part_bytes == 3 * 512 * 2 + 4 * 64 * 64 * 4, "without the padding of its block"
    assert contract.groups[1].codec.endswith("bfloat16[3x512]/float32[4x64x64]")
    tables = ([0, 5], [0, 6], [1, 2, 3])
    assert found.groups[1].blocks(tables, 1, 288, 400) == ((5,), (6,))
    assert found.groups[1].blocks(tables, 0, 288, 288) == ((0,), (0,))


def test_a_page_may_span_several_blocks_of_some_groups() -> None:
    found = plan((full(block=64), [0]), (window(block=32), [1]))
    assert (found.contract.page_tokens, found.contract.block_tokens) == (64, 32)
    assert found.groups[1].blocks(([], [4, 5, 6]), 1, 64, 96) == ((6,),)
    assert found.contract.groups[1].part_bytes == 2 * 2 * 32 * 128 * 2


def test_shards_are_shares_of_heads() -> None:
    wide = plan((full(heads=1), [0]), ranks=2)
    narrow = plan((full(heads=2), [0]), ranks=1, shards=2)
    assert wide.contract == narrow.contract
    assert [wide.share(0, rank) for rank in (0, 1)] == [Share(0, 1, True), Share(1, 1, True)]
    assert narrow.share(0, 0) == Share(0, 2, True)
    copied = plan((full(heads=1), [0]), ranks=4)  # more ranks than heads
    assert copied.contract == wide.contract
    assert [copied.share(0, rank).writes for rank in range(4)] == [True, False, True, False]


def test_a_latent_has_one_writer() -> None:
    found = plan((latent(), [0]), ranks=2, shards=2)
    assert [found.share(0, rank) for rank in (0, 1)] == [Share(0, 2, True), Share(0, 2, False)]
    assert found.contract == plan((latent(), [0]), shards=2).contract


def test_engines_that_keep_blocks_otherwise_do_not_match() -> None:
    with pytest.raises(ContractError, match="page_tokens"):
        plan((full(), [0])).contract.require_equal(plan((full(block=64), [0])).contract)
    with pytest.raises(ContractError, match=r"groups\[0\].codec"):
        plan((full(), [0])).contract.require_equal(plan((full(), [0]), layout="LBNHC").contract)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: plan((full(), [0]), pipeline=2), "--pipeline-parallel-size: found 2, expected 1"),
        (
            lambda: plan((full(), [0]), (ChunkedLocalAttentionSpec(
                block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=64), [1])),
            r"layers\.1\.attn: found ChunkedLocalAttentionSpec, expected full attention",
        ),
        (lambda: plan((full(sliding_window=64), [0])), "remove --disable-hybrid-kv-cache-manager"),
        (lambda: plan((state(num_speculative_blocks=1), [0])), "found speculative decoding on a linear state"),
        (lambda: plan((window(extra_retained_tokens=3), [0])), "found 3 tokens kept below the window"),
        (lambda: plan((full(block=8), [0])), "--block-size: found 8, expected a multiple of 16"),
        (lambda: plan((state(), [0]), (full(block=288), [1]), shards=2), "shards: found 2, expected 1: .* linear_st"),
        (lambda: plan((full(), [0]), shards=2, layout="LBNHC"), "shards: found 2, expected 1: .* full_attention"),
        (lambda: plan((full(heads=1), [0]), ranks=2, shards=3), "shards: found 3, expected a multiple of 2"),
        (lambda: plan((full(), [0]), cache_hit_alignment_tokens=16), "--prefix-match-unit: found hits at every 16"),
        (lambda: plan((full(heads=1), [0]), ranks=4, heads=3), "found 3 KV heads on 4 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused_with_what_was_found(build, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build()
