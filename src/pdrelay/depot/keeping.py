"""What outgoing transfers keep in the arena, and what they let go of while prompts starve for room.

A transfer pins its names from the start, so that its prompt need not compute again what is here. But many transfers
that each hold a part of what they need can fill the arena, so that no prompt finds room for the rest. Then those let
go, and only *whole* transfers keep their pages: those with all of them here or being written. A prompt reserves all
that it lacks at once, so its transfer is whole from then on, and nobody whose pages are kept waits for room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pdrelay.depot.index import Index
from pdrelay.depot.outbox import Sending

STARVED_SECONDS = 0.5
"""When prompts wait for room for so long and none gets any, transfers let go of what they have only a part of ..."""

SHORT_SECONDS = 10.0
"""... and none takes hold of a part for so long afterwards."""


class Keeping:
    """The pins of outgoing transfers. `by_name` are those that live; `tell_whole` tells the receiver of a change."""

    def __init__(
        self, index: Index, by_name: Mapping[bytes, Iterable[Sending]], tell_whole: Callable[[Sending], None]
    ) -> None:
        self._index, self._by_name, self._tell_whole = index, by_name, tell_whole
        self._refused_since: float | None = None  # prompts wait for room, and none got any
        self._short_until = 0.0

    def start(self, sending: Sending, now: float) -> None:
        """A transfer begins."""
        sending.absent.update(name for name in sending.names if self._index.get(name) is None)
        if not sending.absent or now >= self._short_until:
            self._pin(sending)

    def admitted(self) -> None:
        """A prompt got room."""
        self._refused_since = None

    def refused(self, now: float) -> None:
        """A prompt got no room, and waits."""
        if self._refused_since is None:
            self._refused_since = now

    def watch(self, live: Iterable[Sending], now: float) -> None:
        """Lets go of what keeps prompts from room. Call a few times a second."""
        if self._refused_since is not None and now - self._refused_since >= STARVED_SECONDS:
            self._refused_since, self._short_until = None, now + SHORT_SECONDS
            for sending in live:
                if sending.absent and sending.pinned:
                    sending.pinned = False
                    self._index.unpin(sending.owner, sending.names)

    def here(self, name: bytes) -> None:
        """The page has a copy or a writer now."""
        for sending in self._by_name.get(name, ()):
            sending.absent.discard(name)
            if not sending.absent and not sending.pinned:
                self._pin(sending)
            self._tell_whole(sending)

    def gone(self, name: bytes) -> None:
        """The page lost its copy or writer; it may have a new one already."""
        absent = self._index.get(name) is None
        for sending in self._by_name.get(name, ()):
            sending.ready.pop(name, None)
            if absent:
                sending.absent.add(name)
                self._tell_whole(sending)

    def _pin(self, sending: Sending) -> None:
        sending.pinned = True
        self._index.pin(sending.owner, sending.names)
