"""The receiving end of a NIXL path: an agent that the sender writes through, and the check of what it wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pdrelay.depot import link_messages as link
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.nixl.base import MakeAgent
from pdrelay.errors import DepotError, ProtocolError

logger = logging.getLogger(__name__)

CHECKERS = 4  # threads that verify checksums


class Landing:
    """Lives as long as one conversation with `peer`; the next one's `former`."""

    def __init__(
        self, hub: Hub, peer: str, make_agent: MakeAgent, former: Landing | None,
        on_ready: Callable[[link.Endpoint], None],
        on_batch: Callable[[int | None, list[Landed]], None],
        settle: Callable[[], None],
        break_off: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Calls `on_ready` once the peer may write, `on_batch` for what it wrote and then `settle`; `break_off` shall
        end the conversation, for the reason given."""
        self._hub, self._peer, self._former = hub, peer, former
        self._on_ready, self._on_batch, self._break_off = on_ready, on_batch, break_off
        self._agent = make_agent(self)
        self._mailbox = Mailbox(settle)
        self._checkers = ThreadPoolExecutor(CHECKERS, "nixl check")
        self._closed = False
        self._starting = asyncio.create_task(self._start())
        self._ending: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        """What the payload takes."""
        return self._agent.path

    def close(self) -> None:
        """The conversation is over. Does not wait."""
        self._closed = True
        self._agent.close()
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def aclose(self) -> None:
        """Waits, after `close`, until the peer can write here no more and what it wrote is dealt with."""
        self.close()
        assert self._ending is not None
        await self._ending

    async def _start(self) -> None:
        try:
            if self._former is not None:
                await self._former.aclose()
                self._former = None
            if self._closed:
                return
            endpoint = await self._agent.start()
        except DepotError as error:
            self.broken(str(error))
            return
        if not self._closed:
            self._hub.receivers.grants.open(self._peer, self._break_off)
            self._on_ready(endpoint)

    async def _end(self) -> None:
        await self._starting
        await self._agent.aclose()
        await asyncio.to_thread(self._checkers.shutdown)  # what the threads posted comes before its end
        self._hub.receivers.grants.lost(self._peer)
        self._hub.settle()

    # See AgentListener.

    def written(self, batch: int) -> None:
        """See AgentListener. We write nothing."""

    def notified(self, note: bytes) -> None:
        """See AgentListener."""
        if self._closed:
            return
        try:
            message = link.decode_note(note)
        except ProtocolError as error:
            self._break_off(str(error))
            return
        if isinstance(message, link.Closed):
            self._hub.receivers.on_closed(self._peer, message.grants)
            self._hub.settle()
        else:
            self._checkers.submit(self._check, message)

    def broken(self, detail: str) -> None:
        """See AgentListener."""
        if not self._closed:
            logger.warning("NIXL path from depot %s: %s", self._peer, detail)
            self._break_off(detail)

    def _check(self, batch: link.Batch) -> None:
        """Runs in a thread."""
        landed: list[Landed] = []
        try:
            for run in batch.runs:
                self._hub.inbox.check(self._peer, run, landed)
        except ProtocolError as error:
            self._mailbox.post(self._on_batch, None, landed)
            self._mailbox.post(self._break_off, str(error))
        else:
            self._mailbox.post(self._on_batch, batch.batch, landed)
