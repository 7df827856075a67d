"""vLLM's own serving layer as a service: chat templates with tools, parsers of tool calls and reasoning.

An engine instance on vLLM answers a client's request with vLLM's code, but where vLLM would ask its engine, it asks the
gateway: that runs the request through prefill, relay and main decode and feeds the tokens back. One WebSocket at
`/inference/pdrelay/serving` carries one client's request, in frames of the session protocol's form:

    Ask -> Generate (one for each choice), then Feed* for each, meanwhile Reply* up to the last

`Enough` says that a choice needs no more tokens, as at a stop string. A request that fails on the way, or whose client
has left, ends with the connection.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from pdrelay.engine.logprobs import Logprobs
from pdrelay.engine.messages import SUBPROTOCOLS, Prefilled, Sampling
from pdrelay.errors import EngineUnavailableError

SERVING_PATH = "/inference/pdrelay/serving"
MAX_FRAME = 64 << 20  # a request's body and more


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """The client's request: a JSON body of `/v1/chat/completions`."""

    body: bytes


class Feed(msgspec.Struct, frozen=True, kw_only=True, tag="feed", omit_defaults=True):
    """Tokens of a choice; with `reason` its last ones. `prefilled` comes with token 0."""

    choice: str
    ids: list[int]
    logprobs: Logprobs | None = None
    prefilled: Prefilled | None = None
    reason: Literal["stop", "length"] | None = None
    stop_reason: int | None = None


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Asks for the tokens of a choice."""

    choice: str
    prompt: list[int]
    sampling: Sampling


class Enough(msgspec.Struct, frozen=True, tag="enough"):
    """The choice needs no more tokens."""

    choice: str


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply", omit_defaults=True):
    """A part of the answer: of a stream one server-sent event, else the whole body."""

    status: int = 200
    stream: bool = False
    data: bytes = b""
    last: bool = False


ToServing = Ask | Feed
FromServing = Generate | Enough | Reply

_encoder = msgspec.msgpack.Encoder()
_to_serving = msgspec.msgpack.Decoder(list[ToServing])
_from_serving = msgspec.msgpack.Decoder(list[FromServing])


def encode(messages: list[ToServing] | list[FromServing]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def decode_to_serving(frame: bytes) -> list[ToServing]:
    """Messages of a gateway's frame. Raises msgspec.ValidationError."""
    return _to_serving.decode(frame)


class ServingConnection(Protocol):
    """One request at the serving layer, seen from the gateway."""

    async def send(self, message: ToServing) -> None:
        """Raises EngineUnavailableError."""
        ...

    def messages(self) -> AsyncIterator[FromServing]:
        """All messages up to the last Reply. Raises EngineUnavailableError."""
        ...


class WebSocketServing:
    """A `ServingConnection` over a WebSocket."""

    def __init__(self, instance: str, websocket: ClientConnection) -> None:
        self._instance, self._websocket = instance, websocket

    async def send(self, message: ToServing) -> None:
        """See ServingConnection."""
        try:
            await self._websocket.send(encode([message]))
        except ConnectionClosed as error:
            raise self._gone(error) from error

    async def messages(self) -> AsyncIterator[FromServing]:
        """See ServingConnection."""
        while True:
            try:
                messages = _from_serving.decode(await self._websocket.recv(decode=False))
            except (ConnectionClosed, msgspec.DecodeError) as error:
                raise self._gone(error) from error
            for message in messages:
                yield message
                if isinstance(message, Reply) and message.last:
                    return

    def _gone(self, error: Exception) -> EngineUnavailableError:
        return EngineUnavailableError(f"the serving layer of {self._instance} is gone: {error}")


@asynccontextmanager
async def connect_serving(
    instance: str, address: str, tls: ssl.SSLContext | None, *, server_name: str | None = None
) -> AsyncIterator[WebSocketServing]:
    """Opens a connection to `instance` at `address` (`host:port`); `tls` None is plain TCP, for tests.

    Raises EngineUnavailableError.
    """
    url = f"{'ws' if tls is None else 'wss'}://{address}{SERVING_PATH}"
    try:
        websocket = await connect(
            url,
            subprotocols=[Subprotocol(name) for name in SUBPROTOCOLS],
            compression=None,
            proxy=None,  # the environment's web proxy is not meant for engines
            open_timeout=5,
            close_timeout=1,
            max_size=MAX_FRAME,
            ssl=tls,
            server_hostname=None if tls is None else server_name or instance,
        )
    except (OSError, WebSocketException) as error:
        raise EngineUnavailableError(f"the serving layer of {instance} is not reached: {error}") from error
    try:
        yield WebSocketServing(instance, websocket)
    finally:
        await websocket.close()
