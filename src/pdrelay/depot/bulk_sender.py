"""The sending end of a bulk connection: a thread, because payload goes from the arena into TLS without the event loop.

Data flows one way only, so one thread at a time uses a connection's TLS state; acknowledgements travel on the control
connection.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pdrelay.depot import channel, wire
from pdrelay.depot.channel import Writer
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.payload import RunEncoder, encoded
from pdrelay.depot.sockets import shut

logger = logging.getLogger(__name__)

MIN_BACKOFF, MAX_BACKOFF = 0.1, 5.0

Post = Callable[..., None]
"""Runs a function with arguments on the event loop, from any thread, in order."""


class Callbacks(NamedTuple):
    """What a bulk connection tells; all run on the event loop."""

    post: Post
    on_open: Callable[[BulkSender, BatchQueue], None]
    on_written: Callable[[BulkSender, FlyingBatch], None]
    on_broken: Callable[[BulkSender], None]


URGENCIES = 3
"""See FlyingBatch."""


class BatchQueue:
    """Batches that a thread shall write, the most urgent first."""

    def __init__(self) -> None:
        self._batches: tuple[deque[FlyingBatch], ...] = tuple(deque() for _ in range(URGENCIES))
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one a batch; False ends

    def put(self, batch: FlyingBatch) -> None:
        """Queues a batch. On the event loop."""
        self._batches[batch.urgency].append(batch)
        self._tokens.put(True)

    def end(self) -> None:
        """Lets `get` return None, now and ever after."""
        for batches in self._batches:
            batches.clear()
        self._tokens.put(False)

    def get(self) -> FlyingBatch | None:
        """The next batch; None at the end. Blocks."""
        if self._tokens.get():
            for batches in self._batches:
                try:
                    return batches.popleft()
                except IndexError:
                    continue
        return None  # `end` may have taken away what a token was for


class BulkSender:
    """One bulk connection of a link, made again when it breaks."""

    def __init__(
        self, name: str, dial: Callable[[], Writer], arena: memoryview, encoder: RunEncoder, callbacks: Callbacks
    ) -> None:
        """`dial` connects and greets; it blocks, and raises OSError. `name` is for logs."""
        self._name, self._dial, self._arena, self._encoder, self._tell = name, dial, arena, encoder, callbacks
        self._stopping = threading.Event()
        self._batches = BatchQueue()
        self.sock: socket.socket | None = None
        self.thread = threading.Thread(target=self._run, name=f"bulk to {name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the connection; `on_broken` follows if it was open. Does not wait."""
        self._stopping.set()
        self.interrupt()

    def interrupt(self) -> None:
        """Breaks the present connection."""
        self._batches.end()
        if (sock := self.sock) is not None:
            shut(sock)

    def _run(self) -> None:
        backoff = MIN_BACKOFF
        while not self._stopping.is_set():
            try:
                writer = self._dial()
                backoff = MIN_BACKOFF
                self._serve(writer)
            except OSError as error:
                if not self._stopping.is_set():
                    logger.warning("bulk connection to %s: %s", self._name, error)
            self._stopping.wait(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF)

    def _serve(self, writer: Writer) -> None:
        batches = self._batches = BatchQueue()
        self.sock = writer.sock
        self._tell.post(self._tell.on_open, self, batches)
        try:
            # `stop` may have looked at the fields before they were set.
            while not self._stopping.is_set() and (batch := batches.get()) is not None:
                header, payloads = encoded(batch, self._arena, self._encoder)
                writer.send(wire.frame(header), payloads)
                self._tell.post(self._tell.on_written, self, batch)
        finally:
            self.sock = None
            channel.close(writer.sock)
            self._tell.post(self._tell.on_broken, self)
