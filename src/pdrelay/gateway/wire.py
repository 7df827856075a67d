"""One HTTP response as far as it has been sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Send

from pdrelay.gateway.direct import Direct
from pdrelay.gateway.faults import fault_of
from pdrelay.gateway.frames import DONE, event

CLIENT_GONE = 499
JSON = [(b"content-type", b"application/json")]
SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Wire:
    """Sends a whole body or a stream. The status line goes out with the first part of either."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._id, self._send = request_id, send
        self.started = False
        self.status = CLIENT_GONE  # until the response is complete

    async def whole(self, status: int, body: bytes) -> None:
        """The whole response."""
        await self._start(status, [*JSON, (b"content-length", str(len(body)).encode())])
        await self._body(body, more=False)
        self.status = status

    async def part(self, frames: bytes, *, more: bool = True) -> None:
        """A part of a stream, possibly nothing, with which it still begins."""
        if not self.started:
            await self._start(200, SSE)
        if frames or not more:
            await self._body(frames, more=more)
        if not more:
            self.status = 200

    async def fault(self, error: Exception) -> None:
        """Tells the client of an error: as a response of its own, or as the last event of the stream that runs."""
        fault = fault_of(error)
        if self.started:
            await self._body(event(fault.body) + DONE, more=False)
        else:
            await self.whole(fault.status, fault.body)
        self.status = fault.status

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers = [*headers, (b"x-request-id", self._id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive, direct: Direct | None = None) -> None:
    """Runs `work` to its end, or cancels it when the client leaves. The body of the request must have been read.

    With `direct` no task has to watch for that.
    """
    task, gone = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    stop: Callable[[], object]
    if direct is None:
        stop = asyncio.create_task(_when_disconnected(receive, leave)).cancel
    else:
        direct.when_gone(leave)
        stop = direct.stay
    try:
        await work
    except asyncio.CancelledError:
        if not gone or task.uncancel():  # somebody else cancelled it as well
            raise
    finally:
        stop()


async def _when_disconnected(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
