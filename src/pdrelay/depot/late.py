"""Room that a process may still write to although the owner who reserved it has ended.

An engine's scheduler reserves pages and its workers write them, over connections of their own. When the scheduler's
connection breaks, copies that it ordered may still be under way. Their pages are absent at once, so that others can
produce them elsewhere; their room is free when no worker can be at it any more.

INV-DEPOT-8: room that a writer was given is used for nothing else while a process of its engine may write there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdrelay.depot.index import Index

LATE_SECONDS = 60.0
"""Copies are part of a step of the engine, which does not take so long."""


@dataclass(slots=True)
class _Late:
    connections: set[int]  # of the engine, open when the owner ended
    since: float


class LateWriters:
    """Owners that ended while other connections of their engine lived on."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._late: dict[str, _Late] = {}

    def owner_died(self, owner: str, connections: set[int], now: float) -> None:
        """Ends `owner`, whose connection closed; `connections` are the others of its engine."""
        self._index.release(owner, died=True, late=_name(owner) if connections else "")
        if connections:
            self._late[owner] = _Late(connections, now)

    def released(self, owner: str) -> None:
        """A worker is through with what `owner` ordered."""
        if self._late.pop(owner, None) is not None:
            self._index.release(_name(owner))

    def connection_closed(self, connection: int) -> None:
        """A process that might have written is gone, or will not any more."""
        for owner, late in list(self._late.items()):
            late.connections.discard(connection)
            if not late.connections:
                self.released(owner)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        for owner, late in list(self._late.items()):
            if now - late.since >= LATE_SECONDS:
                self.released(owner)


def _name(owner: str) -> str:
    return f"late:{owner}"
