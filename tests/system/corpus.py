"""Prompts of real text, the same on every machine: cut from the project's own licence and documents."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]


def tokens(tokenizer: Tokenizer) -> list[int]:
    """A few thousand tokens of English."""
    text = (ROOT / "LICENSE").read_text()
    return tokenizer.encode(" ".join(text.split()), add_special_tokens=False).ids


def prompts(tokenizer: Tokenizer, count: int, shortest: int, longest: int) -> list[list[int]]:
    """`count` prompts of lengths spread over the range, each starting at another place, so none shares a prefix."""
    corpus = tokens(tokenizer)
    span = max(count - 1, 1)
    lengths = [shortest + (longest - shortest) * i // span for i in range(count)]
    return [(corpus[i * 37 :] + corpus)[:length] for i, length in enumerate(lengths)]
