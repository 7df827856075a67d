"""Sampling defaults that a model's files ask for, as `vllm serve --generation-config auto` reads them.

Engines are given explicit Sampling, so what vLLM's own front end would have filled in is filled in here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from pdrelay.errors import ConfigError


class Defaults(NamedTuple):
    """Values for what a request leaves open, and the tokens that end an output."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    eos: int | None = None  # the tokenizer's, which engines know themselves
    extra_stop_ids: tuple[int, ...] = ()  # further EOS tokens, which act as stop tokens


class _GenerationConfig(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | list[int] | None = None


class _ModelConfig(msgspec.Struct):
    vocab_size: int | None = None
    eos_token_id: int | list[int] | None = None
    text_config: _ModelConfig | None = None


File = TypeVar("File", _GenerationConfig, _ModelConfig)


def load_defaults(directory: Path, eos: int | None) -> Defaults:
    """Reads the defaults of the model in `directory`; `eos` is its tokenizer's. Raises ConfigError."""
    path = directory / "generation_config.json"
    if path.exists():
        config = _read(path, _GenerationConfig)
    else:
        model = _read(directory / "config.json", _ModelConfig)
        nested = model.text_config or _ModelConfig()
        config = _GenerationConfig(
            eos_token_id=nested.eos_token_id if model.eos_token_id is None else model.eos_token_id
        )
    given = {name: getattr(config, name) for name in config.__struct_fields__ if name in Defaults._fields}
    return Defaults(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=config.max_new_tokens,
        eos=eos,
        extra_stop_ids=tuple(token for token in _ids(config.eos_token_id) if token != eos),
    )


def load_vocab_size(directory: Path) -> int:
    """How many token ids the model embeds. Raises ConfigError."""
    path = directory / "config.json"
    model = _read(path, _ModelConfig)
    size = model.vocab_size or (model.text_config.vocab_size if model.text_config else None)
    if size is None:
        raise ConfigError(f"{path}: vocab_size: found nothing, expected the size of the vocabulary")
    return size


def _ids(eos: int | list[int] | None) -> list[int]:
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else eos


def _read(path: Path, model: type[File]) -> File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=model)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
