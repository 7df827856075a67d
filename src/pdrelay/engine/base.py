"""The seams of an engine.

`EngineBackend` is what runs inside the engine's process: vLLM's (`engine/vllm/backend.py`) or the emulated one
(`engine/emulated/`). `engine/server.py` serves any backend on a WebSocket. `Engine` is the gateway's side of it:
`engine/client.py` over the WebSocket, `engine/memory.py` straight onto a backend, for tests and the simulator.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol

from pdrelay.engine.messages import (
    Extend,
    Extended,
    Failed,
    Finished,
    Hello,
    Load,
    Open,
    Opened,
    Takeover,
    Tokens,
)

Chunk = Extend | Takeover
SessionEvent = Opened | Extended | Tokens | Finished | Failed
Emit = Callable[[SessionEvent], None]


class EngineBackend(Protocol):
    """One engine instance, seen from inside."""

    @property
    def hello(self) -> Hello:
        """What it says of itself."""
        ...

    def load(self) -> Load:
        """What it is doing now."""
        ...

    async def run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        """Runs one session to its end, emitting its events in order.

        Takes the next chunk only when the one before is computed. Returns after Finished was emitted. Cancelling it
        aborts the session and frees all it holds. Raises EngineRejectedError for a bad request; the server turns
        that, and any other exception, into Failed.
        """
        ...


class EngineStatus(NamedTuple):
    """What the gateway knows of an engine."""

    healthy: bool
    since: float  # clock time of the last change
    detail: str  # why it is not healthy
    hello: Hello | None  # None before the first contact
    load: Load | None
    counted: int = 0  # sessions of this gateway when it reported `load`


class SessionListener(Protocol):
    """Takes a session's events in the moment in which they come, in the event loop's own callbacks: must not raise."""

    def event(self, event: SessionEvent) -> None:
        """The next event."""
        ...

    def lost(self, message: str) -> None:
        """The connection is gone; nothing more comes."""
        ...


Tap = Callable[[Tokens], bool]
"""Takes tokens in the moment in which they come, or says that it does not. Must not raise."""


class EngineSession(Protocol):
    """One live request on an engine, seen from the gateway."""

    def extend(self, ids: list[int]) -> None:
        """Sends Extend."""
        ...

    def takeover(self, ids: list[int]) -> None:
        """Sends Takeover."""
        ...

    def abort(self) -> None:
        """Ends the session. May be called at any time, also after its end; no event comes afterwards."""
        ...

    def events(self) -> AsyncIterator[SessionEvent]:
        """The session's events, closing with Finished or Failed.

        Raises EngineUnavailableError when the connection is lost.
        """
        ...

    def listen(self, listener: SessionListener, tap: Tap | None = None) -> None:
        """Tells `listener` all events instead, but those that `tap` takes. Called at once after `open`."""
        ...


class Engine(Protocol):
    """One engine instance, seen from the gateway. Keeps its connection alive by itself."""

    @property
    def instance(self) -> str:
        """The instance's name."""
        ...

    @property
    def status(self) -> EngineStatus:
        """Its present state."""
        ...

    def open(self, request: Open) -> EngineSession:
        """Starts a session. Raises EngineUnavailableError at once when there is no connection."""
        ...

    async def aclose(self) -> None:
        """Ends the connection and every session on it."""
        ...
