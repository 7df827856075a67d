"""Where the demo model of `up` is: built once into the cache."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from pdrelay.cli.local import demo_tokenizer
from pdrelay.errors import StartError

NAME = "smollm2-135m-instruct"
EMULATED_NAME = "emulated"


def cache() -> Path:
    """The cache directory of pdrelay."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pdrelay"


def checkpoint() -> Path:
    """The SmolLM2 checkpoint's place in the cache, whether it is there or not."""
    return cache() / NAME


def has_checkpoint() -> bool:
    """Whether the checkpoint is there. It appears in one step, so it is whole."""
    return (checkpoint() / "config.json").exists()


def ensure_checkpoint() -> Path:
    """The checkpoint, built now if it is missing (a minute). Raises StartError."""
    if not has_checkpoint():
        # In a process of its own: it imports torch, and warns of what does not matter here.
        arguments = [sys.executable, "-m", "pdrelay.engine.vllm.checkpoint", str(checkpoint())]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise StartError(f"the model's checkpoint cannot be built: {last.removeprefix('pdrelay: ')}")
    return checkpoint()


def ensure_emulated() -> tuple[Path, Path | None]:
    """Model directory for emulated engines, and the profile for its vocabulary (None: the shipped one).

    The real checkpoint's tokenizer when that is in the cache, else one made now.
    """
    if has_checkpoint():
        return checkpoint(), None
    directory = cache() / "emulated"
    if not (directory / demo_tokenizer.PROFILE).exists():
        _make_tokenizer(directory)
    return directory, directory / demo_tokenizer.PROFILE


def _make_tokenizer(directory: Path) -> None:
    """Makes `directory` appear in one step."""
    draft = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        demo_tokenizer.build(draft)
        shutil.rmtree(directory, ignore_errors=True)
        draft.rename(directory)
    except OSError as error:
        raise StartError(f"{directory}: cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
