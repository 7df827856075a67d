"""How every report of a benchmark names what failed."""

from __future__ import annotations

from collections.abc import Mapping


def failed(failures: Mapping[str, str]) -> list[str]:
    """A line for each part that failed, with its reason."""
    return [f"failed: {part}: {reason}" for part, reason in failures.items()]
