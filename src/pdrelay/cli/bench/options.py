"""Options of benchmarks that click cannot check."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdrelay.errors import ConfigError

Number = TypeVar("Number", int, float)


def parsed(option: str, text: str, parse: Callable[[str], Number], least: float = 0.0) -> Number:
    """The value of a quantity. Raises ConfigError naming the option."""
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if value < least:
        raise ConfigError(f"{option}: found {text!r}, expected at least {least:g}")
    return value
