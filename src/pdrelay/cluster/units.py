"""Quantities as people write them: `20mbit`, `30ms`, `1GiB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from pdrelay.errors import ConfigError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*")
_RATES = {"bit": 1 / 8, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_SIZES = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


def parse_rate(text: str) -> float:
    """Bytes per second of e.g. `20mbit` or `2.5gbit`. Raises ValueError."""
    return _parse(text, _RATES, "a rate such as 20mbit or 10gbit")


def parse_time(text: str) -> float:
    """Seconds of e.g. `30ms` or `2s`. Raises ValueError."""
    return _parse(text, _TIMES, "a time such as 30ms or 2s")


def parse_size(text: str) -> int:
    """Bytes of e.g. `1GiB` or `512MiB`. Raises ValueError."""
    return int(_parse(text, _SIZES, "a size such as 512MiB or 4GiB"))


def size_text(size: float) -> str:
    """`size` bytes as people read them, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, IPv6 hosts in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected an address such as 127.0.0.1:8000, got {text!r}")
    return host.strip("[]"), int(port)


Quantity = TypeVar("Quantity", int, float)


def quantity(key: str, text: str, parse: Callable[[str], Quantity]) -> Quantity:
    """`text` parsed by one of the above. Raises ConfigError naming `key`, what was found and what is expected."""
    try:
        return parse(text)
    except ValueError as error:
        expected, _, found = str(error).removeprefix("expected ").rpartition(", got ")
        raise ConfigError(f"{key}: found {found}, expected {expected}") from error


def _parse(text: str, factors: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    factor = factors.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected {expected}, got {text!r}")
    return float(match[1]) * factor
