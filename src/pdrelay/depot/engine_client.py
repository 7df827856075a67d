"""An engine's connection to the depot of its host: blocking, thread-safe, over the Unix socket."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from pdrelay.depot import wire
from pdrelay.depot.arena import close_map, map_arena
from pdrelay.depot.base import Leases, PageKind, Part, Use
from pdrelay.errors import DepotUnavailableError, ProtocolError
from pdrelay.kv.contract import KVContract

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
"""A depot answers in microseconds; one that does not for so long counts as gone."""

_flags = msgspec.msgpack.Decoder(list[bool])
_counts = msgspec.msgpack.Decoder(int)
_leases = msgspec.msgpack.Decoder(Leases)
_reserved = msgspec.msgpack.Decoder(list[int | None])
_nothing = msgspec.msgpack.Decoder(None)


def connect_engine(socket_path: str | Path, instance: str, contract: KVContract) -> SocketEngineDepot:
    """Connects. Raises DepotUnavailableError, and ContractError when engines or peers of the depot keep KV otherwise.

    Several connections of one instance share its owners: what one leased another may release.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(TIMEOUT_SECONDS)
        sock.connect(str(socket_path))
        hello = wire.Hello(kind="engine", name=instance, epoch=uuid4().hex, contract=contract)
        sock.sendall(wire.frame(hello))
        welcome, fd = _receive_welcome(sock)
        return SocketEngineDepot(sock, map_arena(fd, transparent=welcome.transparent), welcome)
    except OSError as error:
        sock.close()
        raise DepotUnavailableError(f"no depot at {socket_path}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _receive_welcome(sock: socket.socket) -> tuple[wire.Welcome, int]:
    header, fds, _, _ = socket.recv_fds(sock, wire.HEADER.size, 1)
    try:
        if not header:
            raise ConnectionError("it closed the connection")
        header += _receive(sock, wire.HEADER.size - len(header))
        welcome = wire.decode_welcome(_receive(sock, wire.body_length(header)))
        if not fds:
            raise ProtocolError("the depot sent no arena")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return welcome, fds[0]


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionError("it closed the connection")
        at += got
    return bytes(data)


class SocketEngineDepot:
    """EngineDepot over a connected socket. Make it with `connect_engine`."""

    def __init__(self, sock: socket.socket, mapping: mmap.mmap, welcome: wire.Welcome) -> None:
        self._sock, self._map, self._welcome = sock, mapping, welcome
        self._arena = memoryview(mapping)
        self._lock = threading.Lock()
        self._calls = count(1)
        self._closed: str | None = None

    @property
    def arena(self) -> memoryview:
        """The writable shared arena."""
        return self._arena

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        return self._welcome.fleet_key

    @property
    def epoch(self) -> str:
        """See EngineDepot."""
        return self._welcome.epoch

    @property
    def depot(self) -> str:
        """The depot's name."""
        return self._welcome.depot

    def match(self, names: Sequence[bytes]) -> int:
        """See EngineDepot."""
        return self._call(wire.Match(list(names)), _counts)

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """See EngineDepot."""
        return self._call(wire.Holds(list(names)), _flags)

    def lease(self, owner: str, names: Sequence[bytes]) -> Leases:
        """See EngineDepot."""
        return self._call(wire.Lease(owner, list(names)), _leases)

    def corrupt(self, owner: str, names: Sequence[bytes]) -> None:
        """See EngineDepot."""
        self._call(wire.Corrupt(owner, list(names)), _nothing)

    def reserve(self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind]) -> list[int | None]:
        """See EngineDepot."""
        tails = [kind is PageKind.TRANSFER for kind in kinds]
        return self._call(wire.Reserve(owner, list(names), tails), _reserved)

    def publish(self, owner: str, parts: Sequence[Part]) -> None:
        """See EngineDepot."""
        self._tell(wire.Publish(owner, list(parts)))

    def release(self, owner: str) -> None:
        """See EngineDepot."""
        self._call(wire.Release(owner), _nothing)

    def report_held(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineDepot."""
        self._tell(wire.ReportHeld(list(added), list(removed)))

    def report_use(self, use: Use) -> None:
        """See EngineDepot."""
        self._tell(wire.ReportUse(use))

    def close(self) -> None:
        """See EngineDepot. Other threads' calls fail; their arena views stay valid."""
        with suppress(OSError):  # wakes a thread that waits for an answer
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closed = "the connection is closed"
            self._sock.close()
            close_map(self._map, self._arena)

    def _tell(self, request: wire.Request) -> None:
        with self._lock:
            self._send(wire.Tell(request))

    def _call(self, request: wire.Request, decoder: msgspec.msgpack.Decoder[T]) -> T:
        with self._lock:
            call = next(self._calls)
            self._send(wire.Call(call, request))
            answer = self._answer()
        if isinstance(answer, wire.Failure):
            raise wire.rebuild(answer)
        if not isinstance(answer, wire.Reply) or answer.call != call:
            raise ProtocolError(f"expected the reply to call {call}, got {answer}")
        return wire.decoded(decoder, answer.value)

    def _send(self, message: wire.ToDepot) -> None:
        if self._closed is not None:
            raise DepotUnavailableError(self._closed)
        try:
            self._sock.sendall(wire.frame(message))
        except OSError as error:
            raise self._gone(error) from error

    def _answer(self) -> wire.FromDepot:
        try:
            header = _receive(self._sock, wire.HEADER.size)
            return wire.decode_from_depot(_receive(self._sock, wire.body_length(header)))
        except OSError as error:
            raise self._gone(error) from error

    def _gone(self, error: OSError) -> DepotUnavailableError:
        self._closed = f"depot {self._welcome.depot} is gone: {error}"
        self._sock.close()
        return DepotUnavailableError(self._closed)
