"""`pdrelay bench codec` as people run it, on a model with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdrelay.cli.local import demo_tokenizer

MAKE_AND_RUN = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=4096, hidden_size=96, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
                     num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.1)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
from pdrelay.cli.main import main
main(["bench", "codec", "--model", *sys.argv[1:]], prog_name="pdrelay")
"""


pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch", reason="the effect on output needs a model, and that needs torch")
    directory = tmp_path_factory.mktemp("model")
    demo_tokenizer.build(directory)
    options = ["--json", "--prompts", "3", "--prompt-tokens", "80", "--tokens", "8"]
    return subprocess.run(
        [sys.executable, "-c", MAKE_AND_RUN, str(directory), *options],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_every_codec_is_measured_on_all_prompts(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["prompts"], report["prompt_tokens"], report["tokens"]) == (3, 32 + 56 + 80, 8)
    assert report["kv_bytes"] == (1 + 2 + 3) * 32 * 2 * 2 * 16 * 3 * 2
    assert report["command"].endswith("--prompts 3 --prompt-tokens 80 --tokens 8")
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["zstd", "fp8", "int8", "none, chunks of 64"]
    exact = {"agreement": 1.0, "unchanged": 3, "first_divergence": None, "logprob_error": 0.0}
    assert rows["zstd"]["effect"] == exact | {"worst_logprob_error": 0.0}
    for name in ("fp8", "int8"):
        effect, speed = rows[name]["effect"], rows[name]["speed"]
        assert speed["ratio"] == pytest.approx(2, rel=0.01)
        assert 0 < effect["logprob_error"] <= effect["worst_logprob_error"] < 3
        assert effect["agreement"] >= 1 / 8, "the first token is the prefill's"
    assert all(row["speed"]["encode_rate"] > 0 for row in rows.values() if row["speed"])
    assert rows["none, chunks of 64"]["speed"] is None


def test_an_unknown_codec_is_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdrelay.cli.main", "bench", "codec", "--model", str(tmp_path), "--codec", "gzip"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "'gzip' is not one of 'zstd', 'fp8', 'int8'" in found.stderr
