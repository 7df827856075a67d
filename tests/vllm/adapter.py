"""A small random LoRA adapter in PEFT's form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8


def make_adapter(directory: Path, checkpoint: Path) -> Path:
    """Writes an adapter of the queries and values of every layer, large enough to change what the model says."""
    model = json.loads((checkpoint / "config.json").read_text())
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * model["num_key_value_heads"]}
    random, weights = np.random.default_rng(1), {}
    for layer in range(model["num_hidden_layers"]):
        for module, size in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = 0.2 * random.standard_normal((RANK, hidden)).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = 0.05 * random.standard_normal((size, RANK)).astype(np.float32)
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(outputs), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
