"""Options of benchmarks that click cannot check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdrelay.cluster import toml
from pdrelay.errors import ConfigError

Number = TypeVar("Number", int, float)
T = TypeVar("T")

GOALS = ("ttft", "ttst", "tpot", "e2el", "largest_gap")


def parsed(option: str, text: str, parse: Callable[[str], Number], least: float = 0.0) -> Number:
    """The value of a quantity. Raises ConfigError naming the option."""
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if value < least:
        raise ConfigError(f"{option}: found {text!r}, expected at least {least:g}")
    return value


def limits(option: str, texts: Sequence[str]) -> dict[str, float]:
    """Most seconds of each time, from NAME:MILLISECONDS. Raises ConfigError naming the option."""
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            seconds = float(value) / 1e3
        except ValueError:
            seconds = math.nan
        if name not in GOALS or not seconds > 0:
            raise ConfigError(f"{option}: found {text!r}, expected NAME:MILLISECONDS, NAME one of {', '.join(GOALS)}")
        found[name] = seconds
    return found


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ConfigError naming the option."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{option}: found {text[:60]!r}, expected a JSON object ({error})") from error


def changed(option: str, kind: type[T], values: Mapping[str, object], changes: Sequence[str]) -> T:
    """A struct with these values and `changes`, each KEY=VALUE. Raises ConfigError naming what does not fit."""
    raw = dict(values)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"{option}: found {change!r}, expected KEY=VALUE")
        raw[key.strip()] = toml.value(text.strip())
    return toml.convert(Path(option), raw, kind)
