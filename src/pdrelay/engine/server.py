"""The engine's end of the session protocol: serves any `EngineBackend` on a WebSocket.

Runs on every Starlette application, vLLM's FastAPI one included: `app.router.routes.append(SessionServer(b).route())`.
One connection carries all sessions of one gateway process; its end is the end of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Final

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from pdrelay.engine.base import EngineBackend
from pdrelay.engine.messages import PATH, FromEngine, Load, choose_subprotocol, decode_to_engine, encode
from pdrelay.engine.sessions import SessionTable
from pdrelay.errors import ProtocolError

_log = logging.getLogger(__name__)

LOAD_INTERVAL: Final = 1.0
MAX_UNSENT: Final = 65_536
"""Messages that may wait for a slow reader before its connection is ended."""

_REASON_BYTES = 120  # a close frame has room for 123
_PROTOCOL_VIOLATION, _INTERNAL_ERROR, _SLOW_READER = 1002, 1011, 1013  # WebSocket close codes


class SessionServer:
    """Serves one backend to any number of gateways."""

    def __init__(
        self, backend: EngineBackend, *, load_interval: float = LOAD_INTERVAL, max_unsent: int = MAX_UNSENT
    ) -> None:
        self._backend, self._load_interval, self._max_unsent = backend, load_interval, max_unsent

    def route(self) -> WebSocketRoute:
        """The endpoint at `messages.PATH`."""
        return WebSocketRoute(PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one connection to its end. Raises nothing for what the peer does."""
        if not await accept(websocket):
            return
        await _Connection(websocket, self._backend, self._load_interval, self._max_unsent).run()


async def accept(websocket: WebSocket) -> bool:
    """Accepts a connection with the highest version that both sides speak; without one, closes it with the reason."""
    try:
        chosen = choose_subprotocol(websocket.scope.get("subprotocols", []))
    except ProtocolError as error:
        await websocket.accept()
        await websocket.close(_PROTOCOL_VIOLATION, str(error)[:_REASON_BYTES])
        return False
    await websocket.accept(chosen)
    return True


class _CloseError(Exception):
    """The connection must end; the arguments are the WebSocket close code and the reason."""


class _Connection:
    """One gateway's connection."""

    def __init__(self, websocket: WebSocket, backend: EngineBackend, load_interval: float, max_unsent: int) -> None:
        self._websocket, self._backend = websocket, backend
        self._load_interval, self._max_unsent = load_interval, max_unsent
        self._sessions = SessionTable(backend, self._emit)
        self._unsent: list[FromEngine] = [backend.hello]
        self._load: Load | None = None  # the newest one only: a slow reader needs no history
        self._wake, self._overflow = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        loops = (self._read, self._write, self._report_load, self._watch_backlog)
        tasks = [asyncio.create_task(loop()) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(tasks)
            await self._sessions.aclose()
        for task in done:
            await self._close(task.exception())

    async def _close(self, error: BaseException | None) -> None:
        match error:
            case None | WebSocketDisconnect():
                return
            case _CloseError(args=(int(code), str(reason))):
                _log.warning("closing a session connection: %s", reason)
            case _:
                _log.error("session connection failed", exc_info=error)
                code, reason = _INTERNAL_ERROR, "internal error of the engine"
        # A peer that does not read cannot take a close frame either; ending the handler drops it all the same.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1):
                await self._websocket.close(code, reason)

    async def _read(self) -> None:
        while True:
            event = await self._websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            frame = event.get("bytes")
            if frame is None:
                raise _CloseError(_PROTOCOL_VIOLATION, "text frame: the protocol is msgpack")
            try:
                messages = decode_to_engine(frame)
            except msgspec.DecodeError as error:
                raise _CloseError(_PROTOCOL_VIOLATION, f"malformed frame: {error}"[:_REASON_BYTES]) from error
            for message in messages:
                self._sessions.take(message)

    def _emit(self, message: FromEngine) -> None:
        self._unsent.append(message)
        self._wake.set()
        if len(self._unsent) > self._max_unsent:
            self._overflow.set()

    async def _write(self) -> None:
        # The writer wakes in the tick after the first emit: all that one tick emitted leaves in one frame.
        while True:
            if self._load is not None:
                self._unsent.append(self._load)
                self._load = None
            messages, self._unsent = self._unsent, []
            self._wake.clear()
            if messages:
                await self._websocket.send_bytes(encode(messages))
            await self._wake.wait()

    async def _report_load(self) -> None:
        while True:
            self._load = self._backend.load()
            self._wake.set()
            await asyncio.sleep(self._load_interval)

    async def _watch_backlog(self) -> None:
        await self._overflow.wait()
        raise _CloseError(_SLOW_READER, f"the gateway does not read: {len(self._unsent)} messages wait for it")


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
