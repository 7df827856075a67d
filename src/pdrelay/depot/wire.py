"""Frames and the RPC that engines and gateways speak with a depot, over its Unix socket and over TLS alike.

A frame is a length (uint32, little-endian) and that many bytes of msgpack. A connection opens with `Hello` and
`Welcome` (or `Failure`). Then the client sends `Call`s, answered by `Reply` or `Failure` in any order, and `Tell`s,
which nobody answers; the depot sends `Happened` to those who subscribed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from pdrelay.depot.base import DepotEvent, DepotStats, Leases, Progress, Transfer, TransferStats, Use
from pdrelay.errors import (
    ArenaFullError,
    ContractError,
    DepotError,
    DepotUnavailableError,
    PdrelayError,
    ProtocolError,
)
from pdrelay.kv.contract import KVContract
from pdrelay.versions import Versions, agree

T = TypeVar("T")

VERSIONS = Versions(2, 2)
"""Of the RPC."""

HEADER = struct.Struct("<I")
MAX_FRAME = 64 << 20
"""Bytes; names of the longest prompts stay far below."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", array_like=True):
    """The client's first frame. `versions` stays its first field in every version to come."""

    versions: Versions = VERSIONS
    kind: Literal["engine", "control"]
    name: str  # an engine's instance; free text of a gateway
    epoch: str  # of this client: the same after a reconnect, another after a restart
    contract: KVContract | None = None  # engines


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The depot's answer; on an engine's Unix socket the arena's descriptor rides along."""

    versions: Versions
    depot: str
    fleet_key: bytes
    epoch: str  # of the depot's process
    transparent: bool = False  # the arena asks for huge pages where it can get them: who maps it shall, too


# Requests: one for each method of EngineDepot and DepotControl, its arguments as fields.


class Match(msgspec.Struct, frozen=True, tag="match", array_like=True):
    names: list[bytes]


class Holds(msgspec.Struct, frozen=True, tag="holds", array_like=True):
    names: list[bytes]


class Lease(msgspec.Struct, frozen=True, tag="lease", array_like=True):
    owner: str
    names: list[bytes]


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt", array_like=True):
    owner: str
    names: list[bytes]


class Reserve(msgspec.Struct, frozen=True, tag="reserve", array_like=True):
    owner: str
    names: list[bytes]
    transfer_kind: list[bool]


class Publish(msgspec.Struct, frozen=True, tag="publish", array_like=True):
    owner: str
    parts: list[tuple[bytes, int, int]]  # name, part, checksum


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    owner: str


class ReportHeld(msgspec.Struct, frozen=True, tag="held", array_like=True):
    added: list[bytes]
    removed: list[bytes]


class ReportUse(msgspec.Struct, frozen=True, tag="use", array_like=True):
    use: Use


class Wait(msgspec.Struct, frozen=True, tag="wait", array_like=True):
    names: list[bytes]
    engine: str


class CancelCall(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    call: int


class StartTransfer(msgspec.Struct, frozen=True, tag="transfer", array_like=True):
    transfer: Transfer


class Demote(msgspec.Struct, frozen=True, tag="demote", array_like=True):
    xfer: str


class End(msgspec.Struct, frozen=True, tag="end", array_like=True):
    xfer: str


class AskTransferStats(msgspec.Struct, frozen=True, tag="xstats", array_like=True):
    xfer: str


class AskProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    pass


class AskStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    pass


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe", array_like=True):
    stream: int


class Unsubscribe(msgspec.Struct, frozen=True, tag="unsubscribe", array_like=True):
    stream: int


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Asks for a sign of life."""


class KeepOnly(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """After a reconnect: transfers of this client that are neither named nor demoted ended meanwhile."""

    xfers: list[str]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", array_like=True):
    """The client leaves for good: its transfers need no grace."""


EngineRequest = Match | Holds | Lease | Corrupt | Reserve | Publish | Release | ReportHeld | ReportUse
ControlRequest = (
    Wait
    | StartTransfer
    | Demote
    | End
    | AskTransferStats
    | AskProgress
    | AskStats
    | Subscribe
    | Unsubscribe
    | CancelCall
    | Ping
    | KeepOnly
    | Goodbye
)
Request = EngineRequest | ControlRequest


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    call: int
    request: Request


class Tell(msgspec.Struct, frozen=True, tag="tell", array_like=True):
    request: Request


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    call: int
    value: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """`call` failed (0: the connection is refused). `args` rebuild the exception."""

    call: int
    error: str
    args: list[Any]


class Happened(msgspec.Struct, frozen=True, tag="event", array_like=True):
    stream: int
    event: DepotEvent


ToDepot = Call | Tell
FromDepot = Reply | Failure | Happened
Answer = TransferStats | list[Progress] | DepotStats | Leases | list[int | None] | list[bool] | int | None

_encoder = msgspec.msgpack.Encoder()
_to_depot = msgspec.msgpack.Decoder(ToDepot)
_from_depot = msgspec.msgpack.Decoder(FromDepot)
_hello = msgspec.msgpack.Decoder(Hello)
_welcome = msgspec.msgpack.Decoder(Welcome)
_failure = msgspec.msgpack.Decoder(Failure)


def frame(message: msgspec.Struct) -> bytes:
    """`message` as one frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def reply(call: int, value: Answer) -> bytes:
    """The frame that answers `call`."""
    return frame(Reply(call, msgspec.Raw(_encoder.encode(value))))


def decode_to_depot(body: bytes | memoryview) -> ToDepot:
    """A client's message. Raises ProtocolError."""
    return decoded(_to_depot, body)


def decode_from_depot(body: bytes | memoryview) -> FromDepot:
    """A depot's message. Raises ProtocolError."""
    return decoded(_from_depot, body)


def decode_hello(body: bytes | memoryview) -> Hello:
    """A client's first frame. Raises ProtocolError, with both ranges when it speaks no version that we do."""
    agree("depot RPC", VERSIONS, stated_versions(body), "the client")
    return decoded(_hello, body)


def decode_welcome(body: bytes | memoryview) -> Welcome:
    """A depot's first frame. Raises what the depot refused the connection with, or ProtocolError."""
    if stated_tag(body) == "failure":
        raise rebuild(decoded(_failure, body))
    agree("depot RPC", VERSIONS, stated_versions(body), "the depot")
    return decoded(_welcome, body)


def stated_tag(body: bytes | memoryview) -> object:
    """The tag of a message, whatever follows it; None when there is none."""
    return _fields(body)[0]


def stated_versions(body: bytes | memoryview) -> Versions:
    """What the sender of a hello speaks, whatever else its version has in one. Raises ProtocolError."""
    stated = _fields(body)[1]
    if isinstance(stated, int):  # before there was negotiation
        return Versions(stated, stated)
    if isinstance(stated, list) and len(stated) == 2 and all(isinstance(number, int) for number in stated):
        return Versions(*stated)
    raise ProtocolError("unreadable message: a hello states the versions that its sender speaks")


def _fields(body: bytes | memoryview) -> list[object]:
    """The first two fields of a message, None for what it does not have."""
    try:
        found = msgspec.msgpack.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"unreadable message: {error}") from error
    return [*found, None, None][:2] if isinstance(found, list) else [None, None]


def decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview | msgspec.Raw) -> T:
    """`body` as `decoder` reads it. Raises ProtocolError."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"unreadable message: {error}") from error


def body_length(header: bytes | bytearray) -> int:
    """Length of the body that follows `header`. Raises ProtocolError."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes, at most {MAX_FRAME} are allowed")
    return length


class Unframer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies of the frames that `data` completes. Raises ProtocolError."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                end = start + HEADER.size + body_length(self._buffer[start : start + HEADER.size])
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]


_ERRORS: dict[str, type[PdrelayError]] = {
    kind.__name__: kind for kind in (DepotError, ProtocolError, DepotUnavailableError)
}


def failure(call: int, error: PdrelayError) -> bytes:
    """The frame that says that `call` failed."""
    if isinstance(error, ArenaFullError):
        return frame(Failure(call, "ArenaFullError", [error.needed, error.free, error.capacity]))
    if isinstance(error, ContractError):
        return frame(Failure(call, "ContractError", [error.field, error.ours, error.theirs]))
    return frame(Failure(call, type(error).__name__, [str(error)]))


def rebuild(failed: Failure) -> PdrelayError:
    """The exception that the depot raised; a ProtocolError when it cannot be made from what came."""
    try:
        if failed.error == "ArenaFullError":
            return ArenaFullError(*failed.args)
        if failed.error == "ContractError":
            return ContractError(*failed.args)
        return _ERRORS.get(failed.error, DepotError)(*failed.args)
    except TypeError:
        return ProtocolError(f"unreadable failure: {failed.error} with {len(failed.args)} arguments")
