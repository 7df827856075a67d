"""Bulk connections: a thread each, because payload goes from the arena into TLS and back without the event loop.

Data flows one way only, so a connection's TLS state is used by one thread at a time; acknowledgements travel on the
control connection.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.inbox import Inbox, Landed
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.payload import RunEncoder, encoded
from pdrelay.depot.sockets import CONNECT_SECONDS, dial_bulk, read_exactly, receive_frame, require_name, shut
from pdrelay.errors import ProtocolError

logger = logging.getLogger(__name__)

MIN_BACKOFF, MAX_BACKOFF = 0.1, 5.0
LOOK_SECONDS = 0.25
"""An idle connection is looked at so often."""
Batches = queue.SimpleQueue[FlyingBatch | None]
Post = Callable[..., object]
"""Runs a function with arguments on the event loop, from any thread, in order."""


class BulkSender:
    """One bulk connection of a link, made again when it breaks. The listener's methods run on the event loop."""

    def __init__(
        self, address: str, tls: ssl.SSLContext, server_name: str, depot: str, arena: memoryview,
        encoder: RunEncoder, post: Post,
        on_open: Callable[[BulkSender, Batches], None],
        on_written: Callable[[BulkSender, FlyingBatch], None],
        on_broken: Callable[[BulkSender], None],
    ) -> None:  # fmt: skip
        self._address, self._tls, self._server_name, self._depot = address, tls, server_name, depot
        self._arena, self._encoder, self._post = arena, encoder, post
        self._on_open, self._on_written, self._on_broken = on_open, on_written, on_broken
        self._stopping = threading.Event()
        self._sock: socket.socket | None = None
        self._batches: Batches = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"bulk to {server_name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the connection; `on_broken` follows if it was open. Does not wait."""
        self._stopping.set()
        self._batches.put(None)
        if self._sock is not None:
            shut(self._sock)

    def _run(self) -> None:
        backoff = MIN_BACKOFF
        while not self._stopping.is_set():
            try:
                with self._connect() as sock:
                    backoff = MIN_BACKOFF
                    self._serve(sock)
            except OSError as error:
                if not self._stopping.is_set():
                    logger.warning("bulk connection to %s at %s: %s", self._server_name, self._address, error)
            self._stopping.wait(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF)

    def _connect(self) -> ssl.SSLSocket:
        raw = dial_bulk(self._address)
        try:
            sock = self._tls.wrap_socket(raw, server_hostname=self._server_name)
        except BaseException:
            raw.close()
            raise
        sock.settimeout(None)
        return sock

    def _serve(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        batches: Batches = queue.SimpleQueue()
        self._batches = batches
        sock.sendall(wire.frame(link.BulkHello(depot=self._depot)))
        self._post(self._on_open, self, batches)
        try:
            # `stop` may have looked at the fields before they were set.
            while not self._stopping.is_set() and (batch := _next(sock, batches)) is not None:
                self._send(sock, batch)
                self._post(self._on_written, self, batch)
        finally:
            self._sock = None
            self._post(self._on_broken, self)

    def _send(self, sock: ssl.SSLSocket, batch: FlyingBatch) -> None:
        header, payloads = encoded(batch, self._arena, self._encoder)
        sock.sendall(wire.frame(header))
        for data in payloads:
            sock.sendall(data)


def _next(sock: socket.socket, batches: Batches) -> FlyingBatch | None:
    """The next batch. Raises ConnectionError when the other side ends the connection meanwhile: what it has not read
    must go over another one, though there may be nothing more to write that would show it."""
    while True:
        try:
            return batches.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            # The other side never sends anything but an alert or the end.
            if select.select([sock], [], [], 0)[0]:
                raise ConnectionError("the other side ended the connection") from None


class BulkReceiver:
    """The other end: one accepted connection. `find` runs on the event loop's side of `ask`."""

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext, inbox: Inbox, post: Post,
        admit: Callable[[BulkReceiver, str], None],
        on_batch: Callable[[BulkReceiver, int | None, list[Landed]], None],
        on_end: Callable[[BulkReceiver], None],
    ) -> None:  # fmt: skip
        self._raw, self._tls, self._inbox, self._post = sock, tls, inbox, post
        self._admit, self._on_batch, self._on_end = admit, on_batch, on_end
        self._sock: socket.socket = sock
        self.thread = threading.Thread(target=self._run, name="bulk receiver", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Breaks the connection. Does not wait."""
        shut(self._sock)

    def _run(self) -> None:
        try:
            self._raw.settimeout(CONNECT_SECONDS)
            with self._tls.wrap_socket(self._raw, server_side=True) as sock:
                self._sock = sock
                hello = link.decode_bulk_hello(receive_frame(sock))
                require_name(hello.depot, sock.getpeercert())
                if hello.version != link.VERSION:
                    raise ProtocolError(f"link protocol version {link.VERSION} here, {hello.version} there")
                self._post(self._admit, self, hello.depot)
                sock.settimeout(None)
                while True:
                    self._receive_batch(sock, hello.depot)
        except ConnectionError:
            logger.debug("a bulk connection ended")
        except (OSError, ProtocolError) as error:
            logger.warning("bulk connection refused or broken: %s", error)
        finally:
            with suppress(OSError):
                self._raw.close()
            self._post(self._on_end, self)

    def _receive_batch(self, sock: ssl.SSLSocket, sender: str) -> None:
        batch = link.decode_batch(receive_frame(sock))
        landed: list[Landed] = []
        whole: int | None = None
        try:
            for run in batch.runs:
                self._inbox.receive(sender, run, lambda view: read_exactly(sock, view), landed)
            whole = batch.batch
        finally:
            self._post(self._on_batch, self, whole, landed)
