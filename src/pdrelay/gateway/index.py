"""What the gateway knows of cached pages, fed by the depots' events."""

from __future__ import annotations

from collections.abc import Sequence, Set

from pdrelay.depot.base import Forgotten, Removed, Stored
from pdrelay.kv.contract import KVGroup
from pdrelay.kv.demand import usable_prefix
from pdrelay.kv.names import PromptPages

_NOTHING: Set[bytes] = frozenset()


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

    def usable(self, pages: PromptPages, groups: Sequence[KVGroup], depot: str, engine: str) -> int:
        """Tokens of the prompt that need not be computed, given what `depot` and the own cache of `engine` have."""
        stored, held = self._held.get(depot, _NOTHING), self._held.get(engine, _NOTHING)
        if not (stored or held):
            return 0
        return usable_prefix(pages, groups, lambda name: name in stored or name in held)
