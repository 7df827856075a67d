"""A small tokenizer made on the spot, so that an emulated deployment needs no model and no download.

Byte-level BPE, trained on the language reference that comes with Python: every text round-trips, and the tokens that
an emulated engine draws read as words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from pdrelay.perf.profile import shipped

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = SPECIAL.index("<|im_end|>")
FIRST_WORD = len(SPECIAL) + 256  # after the special tokens and the single bytes
PROFILE = "emulated.toml"
"""Profile in the same directory, whose emulated engines draw from this vocabulary."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(directory: Path) -> None:
    """Writes tokenizer, chat template, model configuration and profile into `directory`, which must exist."""
    _train(directory / "tokenizer.json")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[EOS],
            "unk_token": SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    # `llama` only tells transformers how to read the directory: there are no weights.
    _write_json(directory / "config.json", {"model_type": "llama", "vocab_size": VOCABULARY, "eos_token_id": EOS})
    (directory / PROFILE).write_text(_profile())


def _train(path: Path) -> None:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain(topics.values()), trainer)
    tokenizer.save(str(path))


def _plain(texts: Iterable[str]) -> list[str]:
    """Sentences only: without the rules, tables and program text of the reference."""
    lines = (line.strip() for text in texts for line in text.splitlines())
    return [line for line in lines if re.fullmatch(r"[A-Za-z][A-Za-z ,.;'\-]{30,}", line)]


def _profile() -> str:
    text = shipped("tiny-emulated").read_text()
    vocabulary = (
        f"[vocabulary] # that of the tokenizer beside this file\n"
        f"first = {FIRST_WORD}\nlast = {VOCABULARY - 1}\neos = {EOS}\neos_probability = 0.005\n"
    )
    changed, count = re.subn(r"(?ms)^\[vocabulary\].*?(?=^\[|\Z)", vocabulary, text)
    assert count == 1
    return changed


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
