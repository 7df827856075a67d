"""The gateway's end of the session protocol: one WebSocket to one engine, kept alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable

import msgspec
from picows import WSHandshakeError, WSInvalidStatusError

from pdrelay.engine.base import EngineStatus
from pdrelay.engine.conversation import Conversation, ConversationEndedError
from pdrelay.engine.handle import SessionHandle
from pdrelay.engine.messages import (
    PATH,
    SUBPROTOCOLS,
    VERSIONS,
    FromEngine,
    Hello,
    Load,
    Open,
    ToEngine,
    Tokens,
    decode_from_engine,
    encode,
)
from pdrelay.errors import EngineUnavailableError, ProtocolError
from pdrelay.versions import agree

_log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.2, 2.0
"""Seconds between attempts to connect: doubled from the first to the last."""


class WebSocketEngine:
    """An `Engine` at `address` (`host:port`). Construct inside a running loop: it connects at once, and again for ever.

    `tls` None is plain TCP, for tests. The engine's certificate must bear `server_name` (default: the instance's name),
    whatever the address says. An engine that does not answer pings, one each `ping_interval` seconds, is taken for
    dead.
    """

    def __init__(
        self,
        instance: str,
        address: str,
        tls: ssl.SSLContext | None,
        *,
        server_name: str | None = None,
        ping_interval: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance, self._tls, self._clock = instance, tls, clock
        self._server_name = None if tls is None else server_name or instance
        self._url = f"{'ws' if tls is None else 'wss'}://{address}{PATH}"
        self._ping_interval = ping_interval
        self._status = EngineStatus(False, clock(), "not connected yet", None, None)
        self._sessions: dict[str, SessionHandle] = {}
        self._unsent: list[ToEngine] = []
        self._conversation: Conversation | None = None
        self._flushing = False
        self._task = asyncio.create_task(self._stay_connected(), name=f"engine {instance}")

    @property
    def instance(self) -> str:
        """The instance's name."""
        return self._instance

    @property
    def status(self) -> EngineStatus:
        """Its present state."""
        return self._status

    def open(self, request: Open) -> SessionHandle:
        """Starts a session. Raises EngineUnavailableError at once when there is no connection.

        A sid is never used twice: events of an aborted session may still be under way.
        """
        if not self._status.healthy:
            raise EngineUnavailableError(f"engine {self._instance}: {self._status.detail}")
        assert request.sid not in self._sessions, f"INV-SESSION-2: sid {request.sid} is in use"
        session = SessionHandle(request.sid, self._send, self._forget)
        self._sessions[request.sid] = session
        self._send(request)
        if request.mode == "prefill":
            self._flush()  # the user waits for token 0: it must not wait for what else this tick does
        return session

    async def aclose(self) -> None:
        """Ends the connection and every session on it."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._went_down("connection closed by us", logging.DEBUG)

    def _send(self, message: ToEngine) -> None:
        self._unsent.append(message)
        if not self._flushing:
            # In the next tick: all that one tick sends leaves in one frame.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._unsent and self._conversation is not None and self._conversation.writable:
            messages, self._unsent = self._unsent, []
            self._conversation.send(encode(messages))

    def _forget(self, sid: str) -> None:
        self._sessions.pop(sid, None)

    async def _stay_connected(self) -> None:
        delay = FIRST_RETRY
        while True:
            try:
                await self._connect_once()
            except Exception as error:
                was_healthy = self._status.healthy
                self._went_down(_explain(error))
                delay = FIRST_RETRY if was_healthy else min(delay * 2, LAST_RETRY)
            await asyncio.sleep(delay)

    async def _connect_once(self) -> None:
        """One connection, from its attempt to its end, which is always an exception."""
        conversation = self._conversation = Conversation(self._receive, self._flush)
        try:
            await conversation.connect(self._url, SUBPROTOCOLS, self._tls, self._server_name)
            await conversation.ended(self._ping_interval)
        finally:
            self._conversation = None
            conversation.close()

    def _receive(self, frame: bytes) -> None:
        sessions = self._sessions
        for message in decode_from_engine(frame):
            if type(message) is not Tokens:
                self._take(message)
            elif (session := sessions.get(message.sid)) is not None and not session.tap(message):
                session.deliver(message)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Load):
            self._status = self._status._replace(load=message, counted=len(self._sessions))
        elif (session := self._sessions.get(message.sid)) is not None:
            session.deliver(message)  # else it was aborted here while the event was under way

    def _greet(self, hello: Hello) -> None:
        agree("session protocol", VERSIONS, hello.versions, f"engine {hello.instance}")
        if hello.instance != self._instance:
            raise _WrongEngineError(f"the engine at {self._url} calls itself {hello.instance}")
        before = self._status.hello
        if before is not None and before.epoch != hello.epoch:
            _log.warning("engine %s has restarted", self._instance)
        self._status = EngineStatus(True, self._clock(), "", hello, self._status.load)

    def _went_down(self, detail: str, level: int = logging.WARNING) -> None:
        if self._status.healthy:
            _log.log(level, "engine %s is down: %s", self._instance, detail)
        since = self._clock() if self._status.healthy else self._status.since
        self._status = EngineStatus(False, since, detail, self._status.hello, None)
        self._unsent.clear()
        for session in list(self._sessions.values()):
            session.lose(f"engine {self._instance}: {detail}")


class _WrongEngineError(Exception):
    """Who answers is not the engine that we want."""


def _explain(error: Exception) -> str:
    """Why there is no connection, for operators."""
    match error:
        case OSError():
            return _explain_attempt(error)
        case WSInvalidStatusError() if error.response is not None:
            return f"answered HTTP {int(error.response.status)}"
        case msgspec.DecodeError():
            return f"sent a malformed frame: {error}"
        case WSHandshakeError() | ConversationEndedError() | _WrongEngineError() | ProtocolError():
            return str(error)
        case _:
            _log.error("engine connection failed", exc_info=error)
            return f"{type(error).__name__}: {error}"


def _explain_attempt(error: OSError) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS failed: {error.reason}"
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return "no answer to the connection attempt"
        case _:
            return (error.strerror or str(error)).lower()
