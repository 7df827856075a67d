"""A gateway's connection to a depot, over its Unix socket or over TLS, that keeps itself alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar
from uuid import uuid4

import msgspec

from pdrelay.depot import wire
from pdrelay.depot.base import DepotEvent, DepotStats, Forgotten, Progress, Removed, Stored, Transfer, TransferStats
from pdrelay.depot.connection import MAX_UNSENT
from pdrelay.depot.keepalive import KeepAlive
from pdrelay.depot.sockets import Streams, dial_control, read_frame
from pdrelay.errors import DepotUnavailableError, PdrelayError

T = TypeVar("T")
logger = logging.getLogger(__name__)

MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0
HELLO_SECONDS = 10.0

Dial = Callable[[], Awaitable[Streams]]

_nothing = msgspec.msgpack.Decoder(None)
_transfer_stats = msgspec.msgpack.Decoder(TransferStats)
_progress = msgspec.msgpack.Decoder(list[Progress])
_depot_stats = msgspec.msgpack.Decoder(DepotStats)


MAX_EVENTS = 100_000
"""Events that may wait for a reader. One that falls further behind starts anew from the present holdings."""


class EventStream:
    """One reader of `events()`, and the holders that it has been told of."""

    def __init__(self, number: int) -> None:
        self.number = number  # of its subscription
        self.queue: asyncio.Queue[DepotEvent] = asyncio.Queue()
        self._holders: dict[str, None] = {}

    @property
    def full(self) -> bool:
        """Whether the reader is too far behind."""
        return self.queue.qsize() >= MAX_EVENTS

    def put(self, event: DepotEvent) -> None:
        """Queues an event."""
        if isinstance(event, Stored | Removed):
            self._holders[event.holder] = None
        elif isinstance(event, Forgotten):
            self._holders.pop(event.holder, None)
        self.queue.put_nowait(event)

    def void(self, depot: str) -> None:
        """All that `depot` told is void: the connection is lost, or the reader too slow. What was not read goes."""
        if self.full:
            while not self.queue.empty():
                self.queue.get_nowait()
        for holder in (self._holders | {depot: None}).copy():
            self.put(Forgotten(holder))


class ControlClient:
    """DepotControl over a connection made by `dial`. Reconnects, tells its transfers and subscriptions anew."""

    def __init__(self, dial: Dial, name: str = "gateway") -> None:
        self._dial, self._name, self._epoch = dial, name, uuid4().hex
        self._ids = count(1)
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._streams: dict[int, EventStream] = {}
        self._transfers: dict[str, Transfer] = {}  # not demoted ones: told again after a reconnect
        self._writer: asyncio.StreamWriter | None = None
        self._welcome: wire.Welcome | None = None
        self._why_down = "not connected yet"
        self._connected = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def fleet_key(self) -> bytes:
        """See DepotControl. Raises DepotUnavailableError before the first contact."""
        if self._welcome is None:
            raise DepotUnavailableError(self._why_down)
        return self._welcome.fleet_key

    @property
    def depot(self) -> str:
        """The depot's name. Raises DepotUnavailableError before the first contact."""
        if self._welcome is None:
            raise DepotUnavailableError(self._why_down)
        return self._welcome.depot

    @property
    def trouble(self) -> str:
        """See DepotControl."""
        return "" if self._writer is not None else self._why_down

    async def ready(self, timeout: float) -> None:
        """Waits for the connection. Raises DepotUnavailableError with the reason."""
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        except TimeoutError:
            raise DepotUnavailableError(self._why_down) from None

    async def wait(self, names: Sequence[bytes], engine: str = "") -> None:
        """See DepotControl."""
        await self._call(wire.Wait(list(names), engine), _nothing)

    async def transfer(self, transfer: Transfer) -> None:
        """See DepotControl."""
        self._transfers[transfer.xfer] = transfer  # first: a call that was cut off may have reached the depot
        await self._call(wire.StartTransfer(transfer), _nothing)

    async def demote(self, xfer: str) -> None:
        """See DepotControl."""
        self._transfers.pop(xfer, None)
        await self._call(wire.Demote(xfer), _nothing)

    async def end(self, xfer: str) -> TransferStats:
        """See DepotControl."""
        self._transfers.pop(xfer, None)
        return await self._call(wire.End(xfer), _transfer_stats)

    async def transfer_stats(self, xfer: str) -> TransferStats:
        """See DepotControl."""
        return await self._call(wire.AskTransferStats(xfer), _transfer_stats)

    async def progress(self) -> list[Progress]:
        """See DepotControl."""
        return await self._call(wire.AskProgress(), _progress)

    async def stats(self) -> DepotStats:
        """See DepotControl."""
        return await self._call(wire.AskStats(), _depot_stats)

    async def events(self) -> AsyncIterator[DepotEvent]:
        """See DepotControl."""
        stream = EventStream(next(self._ids))
        self._streams[stream.number] = stream
        self._tell(wire.Subscribe(stream.number))
        try:
            while True:
                yield await stream.queue.get()
        finally:
            self._streams.pop(stream.number, None)
            self._tell(wire.Unsubscribe(stream.number))

    async def aclose(self) -> None:
        """See DepotControl."""
        self._tell(wire.Goodbye())
        writer = self._writer
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if writer is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    # The connection

    async def _run(self) -> None:
        backoff = MIN_BACKOFF
        while True:
            try:
                await self._converse()
                backoff = MIN_BACKOFF
            except (OSError, PdrelayError, TimeoutError, asyncio.IncompleteReadError) as error:
                if self._connected.is_set():
                    backoff = MIN_BACKOFF
                self._down(_explain(error))
            except asyncio.CancelledError:
                self._down("the connection is closed")
                raise
            except Exception:
                logger.exception("connection to the depot failed")
                self._down("internal error, see the log")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF)

    async def _converse(self) -> None:
        async with asyncio.timeout(HELLO_SECONDS):
            reader, writer = await self._dial()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                writer.write(wire.frame(wire.Hello(kind="control", name=self._name, epoch=self._epoch)))
                self._welcome = wire.decode_welcome(await read_frame(reader))
            self._up(writer)
            alive = KeepAlive(writer, lambda: wire.frame(wire.Call(next(self._ids), wire.Ping())))
            await alive.run(self._listen(reader, alive))
        finally:
            self._writer = None
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, alive: KeepAlive) -> None:
        while True:
            message = wire.decode_from_depot(await read_frame(reader))
            alive.heard()
            self._on_message(message)

    def _up(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        for number in self._streams:
            self._tell(wire.Subscribe(number))
        self._tell(wire.KeepOnly(list(self._transfers)))
        for transfer in self._transfers.values():
            future = self._send_call(next(self._ids), wire.StartTransfer(transfer))
            future.add_done_callback(_log_failure)
        self._connected.set()

    def _down(self, why: str) -> None:
        self._why_down = why
        if self._connected.is_set():
            self._connected.clear()
            for stream in self._streams.values():
                stream.void(self.depot)
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(DepotUnavailableError(why))

    def _on_message(self, message: wire.FromDepot) -> None:
        if isinstance(message, wire.Happened):
            self._on_event(message)
            return
        if isinstance(message, wire.Failure) and message.call == 0:
            raise wire.rebuild(message)
        future = self._pending.pop(message.call, None)
        if future is None or future.done():
            return
        if isinstance(message, wire.Failure):
            future.set_exception(wire.rebuild(message))
        else:
            future.set_result(message.value)

    def _on_event(self, message: wire.Happened) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        if not stream.full:
            stream.put(message.event)
            return
        logger.warning("%d events of depot %s were not read: starting anew", stream.queue.qsize(), self.depot)
        stream.void(self.depot)
        del self._streams[stream.number]
        self._tell(wire.Unsubscribe(stream.number))
        stream.number = next(self._ids)
        self._streams[stream.number] = stream
        self._tell(wire.Subscribe(stream.number))

    async def _call(self, request: wire.Request, decoder: msgspec.msgpack.Decoder[T]) -> T:
        if self._writer is None:
            raise DepotUnavailableError(self._why_down)
        call = next(self._ids)
        future = self._send_call(call, request)
        try:
            return wire.decoded(decoder, await future)
        except asyncio.CancelledError:
            self._tell(wire.CancelCall(call))
            raise
        finally:
            self._pending.pop(call, None)

    def _send_call(self, call: int, request: wire.Request) -> asyncio.Future[msgspec.Raw]:
        assert self._writer is not None
        self._pending[call] = future = asyncio.get_running_loop().create_future()
        self._write(wire.Call(call, request))
        return future

    def _write(self, message: wire.Call | wire.Tell) -> None:
        assert self._writer is not None
        self._writer.write(wire.frame(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            logger.warning("depot %s does not read what it is asked: closing the connection", self.depot)
            self._writer.transport.abort()

    def _tell(self, request: wire.Request) -> None:
        if self._writer is not None:
            self._write(wire.Tell(request))


def _explain(error: BaseException) -> str:
    """Why there is no connection, for operators."""
    if isinstance(error, DepotUnavailableError) and str(error):
        return str(error)
    if isinstance(error, asyncio.IncompleteReadError | ConnectionResetError):
        return "it closed the connection"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer to the connection attempt"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _log_failure(future: asyncio.Future[msgspec.Raw]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("a transfer could not be taken up again: %s", error)


def control_over_unix(socket_path: str, name: str = "gateway") -> ControlClient:
    """A client of the depot on this host. Needs a running event loop; connects in the background (see `ready`)."""
    return ControlClient(lambda: asyncio.open_unix_connection(socket_path), name)


def connect_control(address: str, tls: ssl.SSLContext, server_name: str, name: str = "gateway") -> ControlClient:
    """A client of depot `server_name` at `address`, `host:port`. Needs a running event loop; connects in the
    background (see `ready`)."""
    return ControlClient(lambda: dial_control(address, tls, server_name), name)
