"""Drawing into files, with matplotlib where it is installed (extra `bench`)."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from pdrelay.errors import BenchError, ConfigError

SUFFIXES = (".pdf", ".png", ".svg")


def require(path: Path) -> None:
    """Raises ConfigError when no picture can be written to `path`: to be told before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot: found {path.name!r}, expected a name that ends with {', '.join(SUFFIXES)}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--plot: {path.parent} is not a directory that can be written to")
    figure(1, 1)


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches. Raises ConfigError when matplotlib is not installed."""
    try:
        return import_module("matplotlib.figure").Figure(figsize=(width, height))
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdrelay[bench]'") from error


def save(drawn: Any, path: Path) -> None:
    """Writes the figure. Raises BenchError."""
    drawn.tight_layout()
    try:
        drawn.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot: {path} cannot be written: {error}") from error
