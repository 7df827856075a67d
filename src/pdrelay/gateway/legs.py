"""A leg: one session of a request on one engine, with its events merged into the request's queue."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from pdrelay.engine.base import Engine, SessionEvent, Tap
from pdrelay.engine.messages import Open
from pdrelay.gateway.base import Tier


class Lost(NamedTuple):
    """The engine went away in the middle of the session."""

    message: str


class Notice(enum.Enum):
    """What the coordinator tells a running request."""

    LINE_DOWN = "the line to main decode is down"
    PAGES_LOST = "pages that main decode waits for have neither copy nor writer"
    DEPOT_DOWN = "the depot beside prefill is down"
    MAIN_DEPOT_DOWN = "the depot beside main decode is down"


class Untold(NamedTuple):
    """A depot was not told of the request's pages: they will not come."""

    message: str


class Leg:
    """One session. Raises EngineUnavailableError when the engine is down at the start.

    Its events go to `put`, except for tokens that `tap` takes.
    """

    def __init__(self, tier: Tier, engine: Engine, request: Open, put: Put, tap: Tap | None = None) -> None:
        self.tier, self.instance = tier, engine.instance
        self.opened = False  # prompt computed, ready to extend
        self.known = 0  # output tokens that the engine was told
        self.busy = False  # computes an extend
        self.streaming = False  # told to decode
        self._put = put
        self._session = engine.open(request)
        self._session.listen(self, tap)

    def extend(self, tokens: list[int]) -> None:
        """Tells the engine those of the output's first `tokens` that it does not know yet, to compute their KV."""
        self._session.extend(tokens[self.known :])
        self.known, self.busy = len(tokens), True

    def takeover(self, tokens: list[int]) -> None:
        """Tells the engine all `tokens` that it does not know yet, and to decode from there."""
        assert not self.streaming, "INV-HANDOFF-1: a session is told to decode once"
        self._session.takeover(tokens[self.known :])
        self.known, self.streaming = len(tokens), True

    def close(self) -> None:
        """Ends the session; nothing more comes from it."""
        self._session.abort()
        self._put = _ignore  # else neither the leg nor its request would be freed before a garbage collection

    def event(self, event: SessionEvent) -> None:
        """See SessionListener."""
        self._put((self, event))

    def lost(self, message: str) -> None:
        """See SessionListener."""
        self._put((self, Lost(message)))


Item = tuple[Leg, SessionEvent | Lost] | Notice | Untold | Exception
Put = Callable[[Item], None]


def _ignore(_: Item) -> None:
    """Takes what comes of a leg that is closed."""
