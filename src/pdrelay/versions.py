"""Versions of a protocol: each side says the range it speaks, and the highest that both do is spoken.

An upgrade that changes a protocol raises `high`; `low` follows once no part of a fleet speaks the old one any more, so
parts can be upgraded one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from pdrelay.errors import ProtocolError


class Versions(NamedTuple):
    """What one side speaks, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"version {self.high}" if self.low == self.high else f"versions {self.low} to {self.high}"


def agree(protocol: str, ours: Versions, theirs: Versions, they: str) -> int:
    """The highest version that both sides speak. Raises ProtocolError with both ranges; `they` names the other side."""
    version = min(ours.high, theirs.high)
    if version < max(ours.low, theirs.low):
        raise ProtocolError(f"{protocol}: we speak {ours}, {they} speaks {theirs}; upgrade the older one")
    return version
