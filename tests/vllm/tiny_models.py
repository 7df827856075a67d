"""Tiny checkpoints of architectures that keep KV in different ways: random weights with a fixed seed.

Weights are scaled so that each output depends on all of its context and no two tokens are nearly equally likely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    "full": {
        "model_type": "qwen3", "intermediate_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "window": {
        "model_type": "gemma3_text", "intermediate_size": 128, "num_hidden_layers": 6, "num_key_value_heads": 2,
        "head_dim": 32, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "latent": {
        "model_type": "deepseek_v2", "intermediate_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 4,
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, **EXPERTS,
        # As in all released models: vLLM's own rotary kernel for CPUs, used without scaling, spoils latents.
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "state": {
        "model_type": "qwen3_next", "intermediate_size": 128, "num_hidden_layers": 4, "num_key_value_heads": 2,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS,
    },
}  # fmt: skip


def build(kind: str, directory: Path) -> Path:
    """Saves the model that keeps KV as `kind` says; the checkpoint's path."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    options = COMMON | MODELS[kind]
    config = CONFIG_MAPPING[options.pop("model_type")](**options)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "conv1d" not in name:
            torch.nn.init.normal_(weight, std=0.25 if "embed" in name else 1.3 / weight.shape[-1] ** 0.5)
    model.save_pretrained(directory / kind)
    return directory / kind
