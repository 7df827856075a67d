"""One request's answer on the wire: runs its TokenStream to the end, or until the client has gone."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Message, Receive, Scope, Send

from pdrelay.errors import PdrelayError
from pdrelay.gateway.base import Finish, TokenBatch, TokenStream, Trace
from pdrelay.gateway.faults import fault_of
from pdrelay.gateway.frames import DONE, Frames, event
from pdrelay.gateway.metrics import Meter
from pdrelay.gateway.prepare import Prepared
from pdrelay.gateway.responses import Usage, usage_of

log = logging.getLogger(__name__)

CLIENT_GONE = 499
JSON = [(b"content-type", b"application/json")]
SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI response.

    The status line is sent with the first token, so that what fails before it gets a status of its own. However it
    ends, the TokenStream is closed (INV-ANSWER-1).
    """

    def __init__(self, prepared: Prepared, stream: TokenStream, frames: Frames, meter: Meter) -> None:
        self._wanted, self._output, self._request = prepared.wanted, prepared.output, prepared.generation
        self._stream, self._frames, self._meter = stream, frames, meter
        self._started = False
        self._status = CLIENT_GONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. The body of the request must have been read."""
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            await self._close()

    async def _run(self, send: Send) -> None:
        try:
            await (self._send_stream(send) if self._wanted.stream else self._send_whole(send))
        except Exception as error:  # the client must get an answer, whatever it was
            await self._send_fault(send, error)
        else:
            self._status = 200

    async def _close(self) -> None:
        trace: Trace | None = None
        try:
            await self._stream.aclose()
            trace = await self._stream.trace()
        except PdrelayError as error:
            log.warning("request %s: %s", self._request.request_id, error)
        finally:
            self._meter.end(self._status, trace)

    # ---- the two kinds ----

    async def _send_stream(self, send: Send) -> None:
        batch: TokenBatch | None = None
        async for batch in self._stream:
            self._meter.batch(batch)
            await self._send_text(send, self._output.push(batch.ids), batch)
            if self._output.stopped:
                break
        finish = self._stream.finish
        if not self._output.stopped:
            rest = self._output.finish(_natural(finish))
            if rest:
                await self._send_text(send, rest, batch)
        trace = await self._final_trace()
        usage = self._usage() if self._wanted.usage else None
        await self._send(send, self._frames.closing(self._output.ending(finish), usage, trace), more=False)

    async def _send_text(self, send: Send, text: str, batch: TokenBatch | None) -> None:
        """Sends one chunk. Tokens that complete no text are worth a chunk only if it says more than text."""
        wanted = self._wanted
        if wanted.trace or wanted.continuous_usage:
            usage = self._usage() if wanted.continuous_usage else None
            frame = self._frames.marked(text, batch if wanted.trace else None, usage)
        else:
            frame = self._frames.text(text) if text else b""
        await self._send(send, frame)

    async def _send_whole(self, send: Send) -> None:
        pieces = []
        async for batch in self._stream:
            self._meter.batch(batch)
            pieces.append(self._output.push(batch.ids))
            if self._output.stopped:
                break
        finish = self._stream.finish
        if not self._output.stopped:
            pieces.append(self._output.finish(_natural(finish)))
        trace = await self._final_trace()
        body = self._frames.body("".join(pieces), self._output.ending(finish), self._usage(), trace)
        await self._start(send, 200, [*JSON, (b"content-length", str(len(body)).encode())])
        await send(_body(body, more=False))

    # ---- what they share ----

    async def _final_trace(self) -> Trace | None:
        """The trace, if wanted. Closing first makes it complete, and frees engines when a stop string ended it."""
        if self._output.stopped or self._wanted.trace:
            await self._stream.aclose(complete=True)
        return await self._stream.trace() if self._wanted.trace else None

    def _usage(self) -> Usage:
        return usage_of(len(self._request.prompt), self._output.tokens, self._stream.cached_tokens)

    async def _send(self, send: Send, frame: bytes, *, more: bool = True) -> None:
        """Sends a part of the stream, and before the first the status line."""
        if not self._started:
            await self._start(send, 200, SSE)
            frame = self._frames.opening() + frame
        if frame or not more:
            await send(_body(frame, more=more))

    async def _send_fault(self, send: Send, error: Exception) -> None:
        fault = fault_of(error)
        self._status = fault.status
        if self._started:
            await send(_body(event(fault.body) + DONE, more=False))
            return
        await self._start(send, fault.status, [*JSON, (b"content-length", str(len(fault.body)).encode())])
        await send(_body(fault.body, more=False))

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        request_id = (b"x-request-id", self._request.request_id.encode())
        await send({"type": "http.response.start", "status": status, "headers": [*headers, request_id]})


def _natural(finish: Finish | None) -> Finish:
    """A stream that ends without a stop string must say why."""
    assert finish is not None, "INV-ANSWER-2: a token stream ended without a finish"
    return finish


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
