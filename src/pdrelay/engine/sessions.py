"""The sessions of one gateway on one backend: what the protocol asks of an engine, apart from its transport.

`engine/server.py` feeds a table from a WebSocket, `engine/memory.py` by plain calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from pdrelay.engine.base import Chunk, EngineBackend, SessionEvent
from pdrelay.engine.messages import Abort, Failed, Finished, Open, Takeover, ToEngine
from pdrelay.errors import EngineRejectedError, PdrelayError

_log = logging.getLogger(__name__)

MAX_CHUNKS: Final = 1024
"""Chunks of one session that may wait for the engine."""


class SessionTable:
    """Runs sessions on `backend` as messages come; `emit` gets their events, on the running loop."""

    def __init__(self, backend: EngineBackend, emit: Callable[[SessionEvent], None]) -> None:
        self._backend, self._emit = backend, emit
        self._sessions: dict[str, _Session] = {}
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # aborted ones included, until they have let go of all they hold

    def take(self, message: ToEngine) -> None:
        """Handles one message. A violation of the protocol ends its session with Failed; nothing is raised."""
        if self._closed:
            return
        session = self._sessions.get(message.sid)
        match message:
            case Open() if session is None:
                self._open(message)
            case Open():
                self._fail(session, message.sid, 400, "a second Open for a running session")
            case Abort():
                if session is not None:  # else it ended by itself while the abort was under way
                    self._end(session)
            case _ if session is None:
                # Also a chunk that crossed with our Finished: the gateway ignores what comes for ended sessions.
                self._fail(None, message.sid, 404, "no such session")
            case _:
                problem = session.feed(message)
                if problem is not None:
                    self._fail(session, message.sid, 400, problem)

    def abort_all(self) -> None:
        """Aborts all sessions and takes no further message: nothing is emitted any more."""
        self._closed = True
        for session in list(self._sessions.values()):
            self._end(session)

    async def aclose(self) -> None:
        """Aborts all sessions; returns when each has let go of what it held."""
        self.abort_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self, request: Open) -> None:
        session = _Session(request, self._backend, self._emit, self._forget)
        self._sessions[request.sid] = session
        self._tasks.add(session.task)
        session.task.add_done_callback(self._tasks.discard)

    def _fail(self, session: _Session | None, sid: str, status: int, message: str) -> None:
        if session is not None:
            self._end(session)
        self._emit(Failed(sid=sid, status=status, message=message))

    def _end(self, session: _Session) -> None:
        self._forget(session.request.sid)
        session.abort()

    def _forget(self, sid: str) -> None:
        self._sessions.pop(sid, None)


class _Session:
    """One session: the task that runs it, and the chunks that wait for it.

    INV-SESSION-1: nothing is emitted after Finished, Failed or an abort, and every session that is not aborted ends
    with exactly one of Finished and Failed.
    """

    def __init__(
        self,
        request: Open,
        backend: EngineBackend,
        emit: Callable[[SessionEvent], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.request = request
        self._backend, self._emit, self._on_end = backend, emit, on_end
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue(MAX_CHUNKS)
        self._last_chunk_came = request.mode == "prefill"
        self._ended = False
        self.task = asyncio.create_task(self._run(), name=f"session {request.sid}")

    def feed(self, chunk: Chunk) -> str | None:
        """Queues a chunk; what is wrong with it, if anything."""
        if self._last_chunk_came:
            return "chunk for a prefill session" if self.request.mode == "prefill" else "chunk after Takeover"
        if self._chunks.full():
            return f"more than {MAX_CHUNKS} chunks wait for the engine"
        self._last_chunk_came = isinstance(chunk, Takeover)
        self._chunks.put_nowait(chunk)
        return None

    def abort(self) -> None:
        """Ends the session silently."""
        self._ended = True
        self.task.cancel()

    async def _run(self) -> None:
        try:
            await self._backend.run(self.request, self._in_order(), self._report)
        except asyncio.CancelledError:
            self._fail(500, "the engine cancelled the session")
            raise
        except EngineRejectedError as error:
            self._fail(error.status, str(error))
        except PdrelayError as error:
            _log.warning("session %s failed: %s", self.request.sid, error)
            self._fail(500, str(error))
        except Exception as error:
            _log.exception("session %s failed", self.request.sid)
            self._fail(500, f"internal error of the engine: {type(error).__name__}: {error}")
        else:
            self._fail(500, "the engine ended the session without a result")

    def _fail(self, status: int, message: str) -> None:
        self._report(Failed(sid=self.request.sid, status=status, message=message))

    def _report(self, event: SessionEvent) -> None:
        if self._ended:
            return
        self._emit(event)
        if isinstance(event, Finished | Failed):
            self._ended = True
            self._on_end(self.request.sid)

    async def _in_order(self) -> AsyncIterator[Chunk]:
        if self.request.mode == "prefill":
            return
        while True:
            chunk = await self._chunks.get()
            yield chunk
            if isinstance(chunk, Takeover):
                return
