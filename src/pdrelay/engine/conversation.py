"""A client's WebSocket whose messages go from the kernel to their reader, and back, without a task between.

A request exchanges half a dozen small messages with every engine that serves it, so each costs as little as can be:
picows parses and writes frames in C, in the callback of the socket.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from picows import WSCloseCode, WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

OPEN_SECONDS: Final = 5.0
SILENT_PINGS: Final = 3
MAX_MESSAGE: Final = 16 * 2**20

_quiet = logging.getLogger(__name__)
_quiet.setLevel(logging.ERROR)  # whoever holds the conversation says what became of it, once


class ConversationEndedError(Exception):
    """Why there is no conversation any more, for operators."""


class Conversation(WSListener):
    """One connection. Construct inside a running loop.

    `receive` is called with every binary message; what it raises ends the conversation. `on_writable` is called
    whenever messages may be sent: when it is connected, and when a full buffer has emptied. `writable` tells whether.
    """

    def __init__(self, receive: Callable[[bytes], None], on_writable: Callable[[], None]) -> None:
        self._receive, self._on_writable = receive, on_writable
        self._transport: WSTransport | None = None
        self._pieces: list[bytes] = []  # of a message that comes in several frames
        self._begun = self._given_up = False
        self._answered = True
        self._failure: Exception | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self.writable = False

    async def connect(
        self, url: str, protocols: Sequence[str], tls: ssl.SSLContext | None, server_name: str | None
    ) -> None:
        """Raises OSError, ssl.SSLError and TimeoutError included, WSHandshakeError, ConversationEndedError."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await ws_connect(
                    lambda *_: self,
                    url,
                    ssl_context=tls,
                    use_aiofastnet=False,  # its TLS goes past the context, which would not follow rotated certificates
                    websocket_handshake_timeout=OPEN_SECONDS,
                    logger_name=_quiet,
                    max_frame_size=MAX_MESSAGE,
                    extra_headers={"Sec-WebSocket-Protocol": ", ".join(protocols)},
                    max_redirects=0,
                    server_hostname=server_name,
                )
        except BaseException:
            self._given_up = True
            raise
        if not self._begun:
            raise ConversationEndedError("closed the connection during the handshake (does it accept our certificate?)")

    def send(self, message: bytes) -> None:
        """Sends one message; does nothing once the conversation has ended."""
        if self._transport is not None:
            self._transport.send(WSMsgType.BINARY, message)

    async def ended(self, ping_interval: float) -> None:
        """Waits for the end and raises why it came. Nobody there is an end, too: `SILENT_PINGS` pings, one every
        `ping_interval` seconds, that are not answered. They are counted, not timed: it may be us who stood still."""
        silent = 0
        while not self._ended.done():
            if silent == SILENT_PINGS:
                self._fail(ConversationEndedError(f"no answer to {SILENT_PINGS} pings"))
            assert self._transport is not None
            self._answered = False
            self._transport.send_ping()
            await asyncio.wait([self._ended], timeout=ping_interval)
            silent = 0 if self._answered else silent + 1
        raise self._failure or ConversationEndedError("connection lost")

    def close(self) -> None:
        """Says goodbye and ends the connection."""
        if self._transport is not None:
            self._transport.send_close(WSCloseCode.OK)
            self._transport.disconnect()

    # ---- what picows tells ----

    def on_ws_connected(self, transport: WSTransport) -> None:
        """See WSListener."""
        if self._given_up:
            transport.disconnect(graceful=False)
            return
        self._transport, self._begun = transport, True
        self.resume_writing()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        """See WSListener."""
        try:
            kind = frame.msg_type
            if kind == WSMsgType.BINARY and frame.fin:
                self._receive(frame.get_payload_as_bytes())
            elif kind == WSMsgType.PONG:
                self._answered = True
            elif kind == WSMsgType.CLOSE:
                self._fail(_closed(frame))
            elif kind == WSMsgType.TEXT:
                self._fail(ConversationEndedError("sent a text frame"))
            else:
                self._continue(frame)
        except Exception as error:
            self._fail(error)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        """See WSListener."""
        self._transport, self.writable = None, False
        shake = transport.close_handshake
        if self._failure is None and shake is not None and shake.sent is not None:  # picows ended it
            self._failure = ConversationEndedError(f"broke the protocol: {shake.sent.reason}")
        self._ended.set_result(None)

    def pause_writing(self) -> None:
        """See WSListener."""
        self.writable = False

    def resume_writing(self) -> None:
        """See WSListener."""
        self.writable = True
        self._on_writable()

    def _continue(self, frame: WSFrame) -> None:
        self._pieces.append(frame.get_payload_as_bytes())
        if sum(map(len, self._pieces)) > MAX_MESSAGE:
            raise ConversationEndedError(f"sent a message of more than {MAX_MESSAGE} bytes")
        if frame.fin:
            pieces, self._pieces = self._pieces, []
            self._receive(b"".join(pieces))

    def _fail(self, failure: Exception) -> None:
        """Ends the conversation; the first failure is why."""
        self._failure = self._failure or failure
        if self._transport is not None:
            own = not isinstance(failure, _ClosedError)
            self._transport.send_close(WSCloseCode.INTERNAL_ERROR if own else WSCloseCode.OK)
            self._transport.disconnect(graceful=not own)


class _ClosedError(ConversationEndedError):
    """The other side ended it."""


def _closed(frame: WSFrame) -> _ClosedError:
    told = {WSCloseCode.GOING_AWAY: "shut down", WSCloseCode.SERVICE_RESTART: "shut down"}
    return _ClosedError(frame.get_close_reason() or told.get(frame.get_close_code(), "closed the connection"))
