"""The receiving end of a bulk connection: a thread, because payload goes from TLS into the arena without the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from pdrelay.depot import channel
from pdrelay.depot import link_messages as link
from pdrelay.depot.channel import Reader
from pdrelay.depot.inbox import Inbox, Landed
from pdrelay.depot.payload import discard
from pdrelay.depot.sockets import shut
from pdrelay.errors import ProtocolError

logger = logging.getLogger(__name__)


class Callbacks(NamedTuple):
    """What a bulk connection tells; all run on the event loop."""

    post: Callable[..., None]  # runs a function with arguments there, from any thread, in order
    on_batch: Callable[[BulkReceiver, int | None, list[Landed]], None]  # number None: it broke in the middle
    on_end: Callable[[BulkReceiver], None]


class BulkReceiver:
    """One accepted connection from depot `sender`, past its hello."""

    def __init__(self, reader: Reader, sender: str, inbox: Inbox, callbacks: Callbacks) -> None:
        self._reader, self._sender, self._inbox, self._tell = reader, sender, inbox, callbacks
        self.thread = threading.Thread(target=self._run, name=f"bulk from {sender}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Breaks the connection. Does not wait."""
        shut(self._reader.sock)

    def _run(self) -> None:
        try:
            while True:
                self._receive_batch()
        except ConnectionError:
            logger.debug("a bulk connection from %s ended", self._sender)
        except (OSError, ProtocolError) as error:
            logger.warning("bulk connection from %s: %s", self._sender, error)
        finally:
            channel.close(self._reader.sock)
            self._tell.post(self._tell.on_end, self)

    def _receive_batch(self) -> None:
        batch = link.decode_batch(self._reader.read_frame())
        landed: list[Landed] = []
        whole: int | None = None
        try:
            for run in batch.runs:
                self._inbox.receive(self._sender, run, self._reader.read_into, landed)
            discard(batch.padding, self._reader.read_into)
            whole = batch.batch
        finally:
            self._tell.post(self._tell.on_batch, self, whole, landed)
