"""The in-memory twin of `engine/client.py` and `engine/server.py`: an `Engine` straight onto a backend.

The session rules are the real ones (`SessionTable`, `SessionHandle`); only the wire is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdrelay.engine.base import EngineBackend, EngineStatus, SessionEvent
from pdrelay.engine.handle import SessionHandle
from pdrelay.engine.messages import Open, ToEngine, Tokens
from pdrelay.engine.sessions import SessionTable
from pdrelay.errors import EngineUnavailableError


class LocalEngine:
    """An `Engine` in the caller's loop. `kill` and `revive` play the death of its process."""

    def __init__(self, backend: EngineBackend, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend, self._clock = backend, clock
        self._handles: dict[str, SessionHandle] = {}
        self._table = SessionTable(backend, self._deliver)
        self._dying: set[asyncio.Task[None]] = set()
        self._healthy, self._since, self._detail = True, clock(), ""

    @property
    def instance(self) -> str:
        """The instance's name."""
        return self._backend.hello.instance

    @property
    def status(self) -> EngineStatus:
        """Its present state."""
        load = self._backend.load() if self._healthy else None
        return EngineStatus(self._healthy, self._since, self._detail, self._backend.hello, load, len(self._handles))

    def open(self, request: Open) -> SessionHandle:
        """Starts a session. Raises EngineUnavailableError while the engine is down."""
        if not self._healthy:
            raise EngineUnavailableError(f"engine {self.instance}: {self._detail}")
        handle = SessionHandle(request.sid, self._send, self._forget)
        self._handles[request.sid] = handle
        self._send(request)
        return handle

    def kill(self, detail: str = "connection lost") -> None:
        """Drops every session at once, as when the engine's process dies."""
        self._healthy, self._since, self._detail = False, self._clock(), detail
        for handle in list(self._handles.values()):
            handle.lose(f"engine {self.instance}: {detail}")
        self._table.abort_all()
        closing = asyncio.create_task(self._table.aclose())
        self._dying.add(closing)
        closing.add_done_callback(self._dying.discard)

    def revive(self, backend: EngineBackend | None = None) -> None:
        """Brings the engine back, by default with the same backend and all it remembers."""
        assert not self._healthy, "the engine is alive"
        self._backend = backend or self._backend
        self._table = SessionTable(self._backend, self._deliver)
        self._healthy, self._since, self._detail = True, self._clock(), ""

    async def aclose(self) -> None:
        """Ends every session; returns when all they held is free."""
        if self._healthy:
            self.kill("connection closed by us")
        await asyncio.gather(*self._dying)

    def _send(self, message: ToEngine) -> None:
        # In a tick of its own, as over a wire: the caller never runs inside the engine or the other way round.
        asyncio.get_running_loop().call_soon(self._table.take, message)

    def _deliver(self, event: SessionEvent) -> None:
        handle = self._handles.get(event.sid)
        if handle is not None and not (isinstance(event, Tokens) and handle.tap(event)):
            handle.deliver(event)

    def _forget(self, sid: str) -> None:
        self._handles.pop(sid, None)
