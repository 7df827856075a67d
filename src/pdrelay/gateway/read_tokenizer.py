"""Reads a model's tokenizer with transformers and ends.

    python -m pdrelay.gateway.read_tokenizer DIRECTORY

Writes `TokenizerData` or `Unusable` as msgpack to standard output; whatever libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pdrelay.gateway.tokenizer_data import TokenizerData, Unusable

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
INSISTS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class _Stored(msgspec.Struct):
    pre_tokenizer: dict[str, Any] | None = None


def main() -> None:
    """Reads the directory that the command line names."""
    gc.disable()  # a quarter of the time, for a process that ends
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answer.write(msgspec.msgpack.encode(read(sys.argv[1])))


def read(directory: str) -> TokenizerData | Unusable:
    """What transformers makes of the files in `directory`."""
    # torch would be loaded for nothing: seconds. Without it transformers would advise to install it.
    sys.modules["torch"] = None  # type: ignore[assignment]  # import's documented way to say: not there
    os.environ[ADVICE] = "1"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        return Unusable(f"no usable tokenizer: {str(error).partition(chr(10))[0]}")
    if not tokenizer.is_fast:
        return Unusable("found a tokenizer without tokenizer.json, expected a fast tokenizer")
    return data_of(tokenizer)


def data_of(tokenizer: Any) -> TokenizerData:
    """What the front end needs of a fast tokenizer of transformers."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    stored = backend.to_str()
    return TokenizerData(
        backend=stored.encode(),
        chat_template=_template_of(tokenizer.chat_template),
        special_tokens=tokenizer.special_tokens_map,
        eos=tokenizer.eos_token_id,
        encode_special_tokens=backend.encode_special_tokens,
        cleans_up=_cleans_up(tokenizer, backend),
        leading_space=_leading_space(stored),
        max_token_chars=max(map(len, backend.get_vocab()), default=1),
    )


def _template_of(stored: str | dict[str, str] | None) -> str | None:
    """That for chats without tools: a model may have several by name."""
    return stored.get("default") if isinstance(stored, dict) else stored


def _cleans_up(tokenizer: Any, backend: Tokenizer) -> bool:
    """transformers heeds the setting with BPE only where a second one insists; before version 5 it always did."""
    wanted, insists = tokenizer.clean_up_tokenization_spaces, getattr(tokenizer, INSISTS, True)
    return bool(wanted and (insists or type(backend.model).__name__ != "BPE"))


def _leading_space(stored: str) -> str | None:
    steps = msgspec.json.decode(stored, type=_Stored).pre_tokenizer or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Metaspace":
            return str(step.get("replacement", "\u2581"))
    return None


if __name__ == "__main__":
    main()
