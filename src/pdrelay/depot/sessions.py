"""One client's conversation with the hub: messages in, frames out. Knows nothing of sockets."""

from __future__ import annotations

from collections.abc import Callable

from pdrelay.depot import wire
from pdrelay.depot.base import PageKind
from pdrelay.depot.hub import Hub
from pdrelay.depot.waiters import Waiter
from pdrelay.errors import DepotError, PdrelayError, ProtocolError

Write = Callable[[bytes], None]


class EngineSession:
    """A connection of an engine. Raises ContractError when it does not fit the engines and peers already here."""

    def __init__(self, hub: Hub, hello: wire.Hello) -> None:
        if hello.contract is None:
            raise ProtocolError("an engine's hello has no contract")
        self._hub, self._instance, self._contract = hub, hello.name, hello.contract
        self._connection = hub.engine_joins(hello.name, hello.contract)

    def handle(self, body: bytes, write: Write) -> None:
        """Answers one message. Raises ProtocolError."""
        message = wire.decode_to_depot(body)
        if isinstance(message, wire.Tell):
            self._answer(message.request)
            return
        try:
            write(wire.reply(message.call, self._answer(message.request)))
        except ProtocolError:
            raise
        except PdrelayError as error:
            write(wire.failure(message.call, error))

    def close(self) -> None:
        """The connection closed."""
        self._hub.engine_leaves(self._instance, self._connection)

    def _answer(self, request: wire.Request) -> wire.Answer:
        hub = self._hub
        match request:
            case wire.Publish():
                hub.publish(self._owner(request.owner), request.parts)
            case wire.Match():
                return hub.match(request.names)
            case wire.Holds():
                return hub.holds(request.names)
            case wire.Lease():
                return hub.lease(self._connection, self._owner(request.owner), request.names)
            case wire.Corrupt():
                hub.corrupt(self._owner(request.owner), request.names)
            case wire.Reserve():
                kinds = [PageKind.TRANSFER if tail else PageKind.PREFIX for tail in request.transfer_kind]
                owner = self._owner(request.owner)
                return hub.reserve(self._connection, owner, request.names, kinds, self._contract)
            case wire.Release():
                hub.release(self._owner(request.owner))
            case wire.ReportUse():
                hub.report_use(self._instance, request.use)
            case wire.ReportHeld():
                hub.report_held(self._instance, self._connection, request.added, request.removed)
            case _:
                raise ProtocolError(f"an engine may not ask for {type(request).__name__}")
        return None

    def _owner(self, owner: str) -> str:
        # Two engines of a host may use the same request id; connections of one engine share it on purpose.
        return f"{self._instance}/{owner}"


class ControlSession:
    """A connection of a gateway, or of an engine's endpoint plug-in."""

    def __init__(self, hub: Hub, hello: wire.Hello) -> None:
        self._hub, self._client = hub, f"{hello.name}/{hello.epoch}"
        self._waiters: dict[int, Waiter] = {}
        self._streams: dict[int, int] = {}
        self._leaving = False
        hub.client_joins(self._client)

    def handle(self, body: bytes, write: Write) -> None:
        """Answers one message; waits are answered later. Raises ProtocolError."""
        message = wire.decode_to_depot(body)
        request = message.request
        if isinstance(message, wire.Tell):
            self._tell(request, write)
        elif isinstance(request, wire.Wait):
            self._wait(message.call, request, write)
        else:
            try:
                write(wire.reply(message.call, self._answer(request)))
            except ProtocolError:
                raise
            except DepotError as error:
                write(wire.failure(message.call, error))

    def close(self) -> None:
        """The connection closed."""
        for waiter in self._waiters.values():
            self._hub.waiters.cancel(waiter)
        for subscription in self._streams.values():
            self._hub.unsubscribe(subscription)
        self._hub.client_leaves(self._client, for_good=self._leaving)

    def _wait(self, call: int, request: wire.Wait, write: Write) -> None:
        answered = False

        def done() -> None:
            nonlocal answered
            answered = True
            self._waiters.pop(call, None)
            write(wire.reply(call, None))

        waiter = self._hub.wait(request.names, request.engine, done)
        if not answered:
            self._waiters[call] = waiter

    def _tell(self, request: wire.Request, write: Write) -> None:
        match request:
            case wire.CancelCall():
                if (waiter := self._waiters.pop(request.call, None)) is not None:
                    self._hub.waiters.cancel(waiter)
            case wire.Subscribe(stream=stream):
                self._streams[stream] = self._hub.subscribe(
                    lambda event: write(wire.frame(wire.Happened(stream, event)))
                )
            case wire.Unsubscribe():
                self._hub.unsubscribe(self._streams.pop(request.stream, 0))
            case wire.KeepOnly():
                self._hub.keep_only(self._client, request.xfers)
            case wire.Goodbye():
                self._leaving = True
            case _:
                raise ProtocolError(f"{type(request).__name__} wants an answer")

    def _answer(self, request: wire.Request) -> wire.Answer:
        match request:
            case wire.StartTransfer():
                self._hub.transfer(request.transfer, self._client)
            case wire.Demote():
                self._hub.demote(request.xfer)
            case wire.End():
                return self._hub.end(request.xfer)
            case wire.AskTransferStats():
                return self._hub.senders.stats(request.xfer)
            case wire.AskProgress():
                return self._hub.progress()
            case wire.AskStats():
                return self._hub.stats()
            case wire.Ping():
                return None
            case _:
                raise ProtocolError(f"a gateway may not ask for {type(request).__name__}")
        return None


def open_session(hub: Hub, hello: wire.Hello, arena_fd: int | None) -> EngineSession | ControlSession:
    """The session that `hello` asks for. Raises ContractError, ProtocolError."""
    if hello.kind == "control":
        return ControlSession(hub, hello)
    if arena_fd is None:
        raise ProtocolError("engines connect over the Unix socket of their host")
    return EngineSession(hub, hello)
