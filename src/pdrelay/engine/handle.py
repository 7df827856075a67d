"""The gateway's handle of a session, the same over a WebSocket and in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from pdrelay.engine.base import SessionEvent, SessionListener, Tap
from pdrelay.engine.messages import Abort, Extend, Failed, Finished, Takeover, ToEngine, Tokens
from pdrelay.errors import EngineUnavailableError

_ENDS = Finished, Failed  # a union type would take ten times as long to look at


class SessionHandle:
    """An `EngineSession`.

    `send` takes its messages. Its transport calls `lose`, and `deliver`: for Tokens only if `tap` has not taken them.
    `on_end` is called once, with the sid, when nothing more can come.
    """

    def __init__(self, sid: str, send: Callable[[ToEngine], None], on_end: Callable[[str], None]) -> None:
        self.sid = sid
        self._send, self._on_end = send, on_end
        self._events: deque[SessionEvent] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._lost: str | None = None
        self._listener: SessionListener | None = None
        self.tap: Tap = _takes_none  # who returns True has taken an event, which is not delivered then

    def extend(self, ids: list[int]) -> None:
        """Sends Extend; nothing when the session has ended."""
        if not self._ended:
            self._send(Extend(self.sid, ids))

    def takeover(self, ids: list[int]) -> None:
        """Sends Takeover; nothing when the session has ended."""
        if not self._ended:
            self._send(Takeover(self.sid, ids))

    def abort(self) -> None:
        """Ends the session. No event comes afterwards."""
        self._events.clear()
        self._lost = None
        if not self._ended:
            self._send(Abort(self.sid))
            self._end()
        self._wake.set()

    def deliver(self, event: SessionEvent) -> None:
        """An event came from the engine."""
        listener = self._listener
        if isinstance(event, _ENDS):
            self._end()  # first: a listener that closes the session then has nothing to abort
        if listener is not None:
            listener.event(event)
        else:
            self._events.append(event)
            self._wake.set()

    def lose(self, detail: str) -> None:
        """The connection is gone: what came before it still comes out, then EngineUnavailableError."""
        if self._ended:
            return
        self._lost, listener = detail, self._listener
        self._end()
        self._wake.set()
        if listener is not None:
            listener.lost(detail)

    def listen(self, listener: SessionListener, tap: Tap | None = None) -> None:
        """See EngineSession."""
        assert not self._events, "events came before anybody listened"
        self._listener, self.tap = listener, tap or _takes_none

    def events(self) -> AsyncIterator[SessionEvent]:
        """The session's events; one consumer. Raises EngineUnavailableError when the connection is lost."""
        return self

    def __aiter__(self) -> AsyncIterator[SessionEvent]:
        return self

    async def __anext__(self) -> SessionEvent:
        while not self._events:
            if self._lost is not None:
                raise EngineUnavailableError(self._lost)
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    def _end(self) -> None:
        self._ended = True
        # They know this handle: none would be freed before a garbage collection.
        self._listener, self.tap = None, _takes_none
        self._on_end(self.sid)


def _takes_none(_: Tokens) -> bool:
    return False
