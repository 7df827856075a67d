"""What the gateway knows of cached pages, fed by the depots' events."""

from __future__ import annotations

from collections.abc import Sequence

from pdrelay.depot.base import Forgotten, Removed, Stored


class PageIndex:
    """Which holder, a depot's arena or an engine's own cache, has which pages."""

    def __init__(self) -> None:
        self._held: dict[str, set[bytes]] = {}

    def apply(self, event: Stored | Removed | Forgotten) -> None:
        """Takes in one event."""
        match event:
            case Stored(holder, names):
                self._held.setdefault(holder, set()).update(names)
            case Removed(holder, names):
                self._held.get(holder, set()).difference_update(names)
            case Forgotten(holder):
                self._held.pop(holder, None)

    def leading(self, names: Sequence[bytes], *holders: str) -> int:
        """How many leading `names` some of `holders` has."""
        sets = [self._held[holder] for holder in holders if holder in self._held]
        for count, name in enumerate(names):
            if not any(name in held for held in sets):
                return count
        return len(names)
