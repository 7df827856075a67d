"""Blocking byte streams of bulk connections, one way each: with TLS or in clear.

A thread moves whole batches with few calls: each call gives up the interpreter's lock and has to win it back.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from typing import Protocol

from pdrelay.depot import wire
from pdrelay.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

_GATHER = 64 << 10  # shorter pieces travel together
_PIECES = 512  # of one system call; the kernel takes 1024
_CIPHERTEXT = 256 << 10
_WORTH_WAKING = 64 << 10


class Writer(Protocol):
    """The sending end."""

    @property
    def sock(self) -> socket.socket:
        """The connection."""
        ...

    def send(self, frame: bytes, pieces: Sequence[Buffer]) -> None:
        """Sends a frame and then all pieces, one after the other. Raises OSError."""
        ...


class Reader(Protocol):
    """The receiving end."""

    @property
    def sock(self) -> socket.socket:
        """The connection."""
        ...

    def read_frame(self) -> bytes:
        """The body of the next frame. Raises OSError, ProtocolError."""
        ...

    def read_into(self, view: memoryview) -> None:
        """Fills the view. Raises OSError, ConnectionError at the end."""
        ...


class TlsWriter:
    """Writer over TLS."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock: ssl.SSLSocket = sock

    def send(self, frame: bytes, pieces: Sequence[Buffer]) -> None:
        """See Writer."""
        gathered = bytearray(frame)
        for piece in pieces:
            if len(piece) < _GATHER:
                gathered += piece
                if len(gathered) < _GATHER:
                    continue
                piece, gathered = gathered, bytearray()
            elif gathered:
                self.sock.sendall(gathered)
                gathered = bytearray()
            self.sock.sendall(piece)
        if gathered:
            self.sock.sendall(gathered)


class TlsReader:
    """Reader over TLS.

    `ssl.SSLSocket` makes two system calls for each record of 16 KiB. This one takes what the kernel has, in large
    pieces, and decrypts it from memory straight into the view.
    """

    def __init__(self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO) -> None:
        """`tls` is past its handshake; `incoming` may hold what was read beyond it. `sock` blocks."""
        self.sock, self._tls, self._incoming = sock, tls, incoming
        self._ciphertext = memoryview(bytearray(_CIPHERTEXT))
        self._least = 1

    def read_frame(self) -> bytes:
        """See Reader."""
        return _read_frame(self)

    def read_into(self, view: memoryview) -> None:
        """See Reader."""
        tls, at, size = self._tls, 0, len(view)
        while at < size:
            try:
                at += _progress(tls.read(size - at, view[at:]))
            except ssl.SSLWantReadError:
                self._refill(size - at)

    def _refill(self, missing: int) -> None:
        """Takes ciphertext from the kernel; `missing` bytes of plaintext are to come for sure."""
        # Woken for every packet of a slow line a thread would do little else than win the interpreter's lock.
        least = _WORTH_WAKING if missing > 2 * _WORTH_WAKING else 1
        if least != self._least:
            self._least = least
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        got = _progress(self.sock.recv_into(self._ciphertext))
        self._incoming.write(self._ciphertext[:got])


SECRET_BYTES, _TAG_BYTES = 32, 16


class _Seal:
    """Proves that frames come, each once and in order, from who knows the connection's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._frames = secret, 0

    def tag(self, body: bytes) -> bytes:
        """Of the next frame."""
        self._frames += 1
        number = self._frames.to_bytes(8, "little")
        return blake2b(number + body, key=self._secret, digest_size=_TAG_BYTES, person=b"pdrelay.frame").digest()


class PlainWriter:
    """Writer in clear. A tag follows each frame; payload is covered by the checksums in it."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock, self._seal = sock, _Seal(secret)

    def send(self, frame: bytes, pieces: Sequence[Buffer]) -> None:
        """See Writer."""
        tag = self._seal.tag(frame[wire.HEADER.size :])
        rest = [memoryview(piece) for piece in (frame, tag, *pieces) if len(piece)]
        at = 0
        while at < len(rest):
            sent = self.sock.sendmsg(rest[at : at + _PIECES])
            while at < len(rest) and sent >= len(rest[at]):
                sent -= len(rest[at])
                at += 1
            if sent:
                rest[at] = rest[at][sent:]


class PlainReader:
    """Reader in clear. `sock` blocks."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock, self._seal = sock, _Seal(secret)

    def read_frame(self) -> bytes:
        """See Reader. Raises ProtocolError for one that does not come from who knows the secret."""
        body, tag = _read_frame(self), bytearray(_TAG_BYTES)
        self.read_into(memoryview(tag))
        if not compare_digest(tag, self._seal.tag(body)):
            raise ProtocolError("a frame in clear whose tag is wrong")
        return body

    def read_into(self, view: memoryview) -> None:
        """See Reader."""
        while len(view):
            view = view[_progress(self.sock.recv_into(view, 0, socket.MSG_WAITALL)) :]


def _progress(got: int | bytes) -> int:
    if not got:
        raise ConnectionError("the other side closed the connection")
    assert isinstance(got, int)
    return got


def _read_frame(reader: Reader) -> bytes:
    header = bytearray(wire.HEADER.size)
    reader.read_into(memoryview(header))
    body = bytearray(wire.body_length(header))
    reader.read_into(memoryview(body))
    return bytes(body)


def close(sock: socket.socket) -> None:
    """Closes without a word."""
    with suppress(OSError):
        sock.close()
