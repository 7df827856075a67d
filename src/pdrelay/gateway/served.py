"""Requests with tools or reasoning: vLLM's serving layer writes the answer, our pipeline makes its tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from pdrelay.engine.messages import Prefilled
from pdrelay.engine.serving import Ask, Enough, Feed, FromServing, Generate, Reply, ServingConnection
from pdrelay.errors import PdrelayError, RequestError
from pdrelay.gateway.base import Finish, GenerationRequest, Serving, TokenBatch, TokenStream, Trace
from pdrelay.gateway.direct import direct_of
from pdrelay.gateway.faults import BAD_REQUEST, SERVER_ERROR
from pdrelay.gateway.frames import DONE, event
from pdrelay.gateway.metrics import Meter
from pdrelay.gateway.responses import Pdrelay, Traces
from pdrelay.gateway.wire import Wire, while_connected

log = logging.getLogger(__name__)

ERROR = b'data: {"error"'
Inbox = asyncio.Queue[FromServing | Exception]
Plan = Callable[[Generate, int], GenerationRequest]
Start = Callable[[GenerationRequest], TokenStream]


class Served(NamedTuple):
    """A request that passed the gateway's own checks. `plan` makes the request of choice number `int`."""

    request_id: str
    body: bytes  # for vLLM
    trace: bool
    plan: Plan


class ServedAnswer:
    """An ASGI response. However it ends, every token stream and the connection are closed (INV-ANSWER-1)."""

    def __init__(self, served: Served, serving: Serving, start: Start, meter: Meter) -> None:
        self._served, self._serving, self._start, self._meter = served, serving, start, meter
        self._streams: dict[str, TokenStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._prefilled = asyncio.Event()  # the first choice has computed the prompt
        self._inbox: Inbox = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. The body of the request must have been read."""
        wire = Wire(self._served.request_id, send)
        try:
            await while_connected(self._run(wire), receive, direct_of(scope))
        finally:
            await self._close(wire.status)

    async def _run(self, wire: Wire) -> None:
        try:
            async with self._serving.connect() as connection:
                await connection.send(Ask(self._served.body))
                reader = asyncio.create_task(self._read(connection))
                try:
                    await self._exchange(wire, connection)
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        except Exception as error:  # the client must get an answer, whatever it was
            await wire.fault(error)

    async def _read(self, connection: ServingConnection) -> None:
        try:
            async for message in connection.messages():
                self._inbox.put_nowait(message)
        except Exception as error:
            self._inbox.put_nowait(error)

    async def _exchange(self, wire: Wire, connection: ServingConnection) -> None:
        while True:
            match await self._inbox.get():
                case Generate() as wanted:
                    self._tasks[wanted.choice] = asyncio.create_task(self._feed(wanted, len(self._tasks), connection))
                case Enough(choice):
                    await self._end(choice, complete=True)
                case Reply() as reply:
                    await self._forward(wire, reply)
                    if reply.last:
                        return
                case Exception() as error:
                    raise error

    # ---- tokens for vLLM ----

    async def _feed(self, wanted: Generate, number: int, connection: ServingConnection) -> None:
        try:
            if number:
                await self._prefilled.wait()  # the choices share one prefill
            else:
                self._meter.prompt(len(wanted.prompt))
            stream = self._streams[wanted.choice] = self._start(self._served.plan(wanted, number))
            # All choices have one prompt: what a later one finds in caches is what the first has just left there.
            leader = next(iter(self._streams.values()))
            held: TokenBatch | None = None
            async for batch in stream:
                self._meter.batch(batch, number)
                self._prefilled.set()
                if batch.last:
                    held = batch  # goes with the reason
                else:
                    await connection.send(_fed(wanted.choice, batch, stream, leader.cached_tokens))
            await connection.send(_fed(wanted.choice, held, stream, leader.cached_tokens, stream.finish))
        except Exception as error:
            self._inbox.put_nowait(error)
        finally:
            self._prefilled.set()

    async def _end(self, choice: str, *, complete: bool) -> None:
        """Ends a choice's stream; `complete` as there."""
        if task := self._tasks.get(choice):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if stream := self._streams.get(choice):
            await stream.aclose(complete=complete)

    # ---- the answer for the client ----

    async def _forward(self, wire: Wire, reply: Reply) -> None:
        if reply.status != 200:
            raise _error(reply.data, reply.status)
        if not reply.stream:
            await wire.whole(200, await self._with_trace(reply.data) if self._served.trace else reply.data)
            return
        if not wire.started and reply.data.startswith(ERROR):
            raise _error(reply.data.removeprefix(b"data: "))
        data = reply.data
        if data == DONE and self._served.trace:
            traces = await self._final_traces()
            head = {"id": self._served.request_id, "object": "chat.completion.chunk", "choices": []}
            data = event(msgspec.json.encode(head | {"pdrelay": traces})) + DONE
        await wire.part(data, more=not reply.last)

    async def _with_trace(self, body: bytes) -> bytes:
        return msgspec.json.encode(msgspec.json.decode(body) | {"pdrelay": await self._final_traces()})

    async def _final_traces(self) -> Pdrelay:
        """Closing first makes them complete."""
        for choice in list(self._streams):
            await self._end(choice, complete=True)
        traces = await self._traces()
        return traces[0] if len(traces) == 1 else Traces(traces)

    async def _traces(self) -> list[Trace]:
        return [await stream.trace() for stream in self._streams.values()]

    async def _close(self, status: int) -> None:
        traces: list[Trace] = []
        try:
            for choice in list(self._tasks):
                await self._end(choice, complete=status == 200)
            traces = await self._traces()
        except PdrelayError as error:
            log.warning("request %s: %s", self._served.request_id, error)
        finally:
            self._meter.end(status, traces)


def _fed(
    choice: str, batch: TokenBatch | None, stream: TokenStream, cached_tokens: int, finish: Finish | None = None
) -> Feed:
    first = batch is not None and batch.index == 0
    return Feed(
        choice=choice,
        ids=batch.ids if batch else [],
        logprobs=batch.logprobs if batch else None,
        prefilled=Prefilled(cached_tokens=cached_tokens, logprobs=stream.prompt_logprobs) if first else None,
        reason=finish and finish.reason,
        stop_reason=finish.stop_reason if finish else None,
    )


def _error(body: bytes, status: int | None = None) -> RequestError:
    """vLLM's error in our form."""
    detail: dict[str, Any] = msgspec.json.decode(body)["error"]
    status = status or int(detail.get("code") or 500)
    kind = BAD_REQUEST if status < 500 else SERVER_ERROR
    return RequestError(detail["message"], status=status, kind=kind, param=detail.get("param"))
