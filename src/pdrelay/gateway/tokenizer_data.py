"""A model's tokenizer and chat template, read by transformers in a process that ends.

transformers and numpy would take 37 MB of every gateway process, for what is needed once.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import msgspec

from pdrelay.errors import ConfigError

READER = (sys.executable, "-m", "pdrelay.gateway.read_tokenizer")
READ_SECONDS = 120.0


class TokenizerData(msgspec.Struct, frozen=True, tag="data"):
    """What the front end needs of a tokenizer of transformers."""

    backend: bytes  # tokenizers' JSON
    chat_template: str | None
    special_tokens: dict[str, str | list[str]]  # as templates see them
    eos: int | None
    encode_special_tokens: bool  # whether special tokens in a text are read as plain text
    cleans_up: bool  # whether decoding takes spaces before punctuation out
    leading_space: str | None  # what stands for a space in vocabularies of the SentencePiece kind
    max_token_chars: int


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """Why there is no tokenizer, in one line."""

    reason: str


def read_tokenizer(directory: Path, shared: Path | None = None) -> TokenizerData:
    """Reads the tokenizer in `directory`. Raises ConfigError.

    Of processes that name the same directory `shared` the first one reads, for all. Takes seconds and blocks.
    """
    if shared is None:
        return _decoded(directory, _read(directory))
    with (shared / "tokenizer").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (answer := file.read()):
            answer = _read(directory)
            file.write(answer)
    return _decoded(directory, answer)


def _read(directory: Path) -> bytes:
    """The reader's answer."""
    try:
        done = subprocess.run([*READER, str(directory)], capture_output=True, timeout=READ_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        raise _died(directory, f"took over {READ_SECONDS:g} s", late.stderr or b"") from late
    if done.returncode:
        raise _died(directory, f"ended with exit code {done.returncode}", done.stderr)
    sys.stderr.write(done.stderr.decode(errors="replace"))  # warnings
    return done.stdout


def _died(directory: Path, how: str, printed: bytes) -> ConfigError:
    lines = printed.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    return ConfigError(f"{directory}: no usable tokenizer: reading it {how}; it printed last: {last}")


def _decoded(directory: Path, answer: bytes) -> TokenizerData:
    found = msgspec.msgpack.decode(answer, type=TokenizerData | Unusable)
    if isinstance(found, Unusable):
        raise ConfigError(f"{directory}: {found.reason}")
    return found
