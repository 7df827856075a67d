"""The receiving end of a NIXL path: an agent that the sender writes through, and the check of what it wrote."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

from pdrelay.depot import link_messages as link
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.mailbox import Mailbox
from pdrelay.depot.nixl.base import MakeAgent
from pdrelay.errors import DepotError, ProtocolError

logger = logging.getLogger(__name__)


class Conversation(NamedTuple):
    """What a landing tells, on the event loop."""

    ready: Callable[[link.Endpoint], None]  # the peer may write
    batch: Callable[[int | None, list[Landed]], None]  # what came of a batch; its number is None if it was nonsense
    settle: Callable[[], None]  # comes after `batch`
    break_off: Callable[[str], None]  # the conversation must end, for that reason


class Landing:
    """Lives as long as one conversation with `peer`; the next one's `former`."""

    def __init__(
        self,
        hub: Hub,
        peer: str,
        make_agent: MakeAgent,
        checkers: Executor,
        conversation: Conversation,
        former: Landing | None,
    ) -> None:
        """`checkers` verify checksums. Starts in the background."""
        self._hub, self._peer, self._checkers, self._former = hub, peer, checkers, former
        self._conversation = conversation
        self._agent = make_agent(self)
        self._mailbox = Mailbox(conversation.settle)
        self._checking: set[Future[None]] = set()
        self._closed = False
        self._starting = asyncio.create_task(self._start())
        self._ending: asyncio.Task[None] | None = None

    def close(self) -> None:
        """The conversation is over. Does not wait."""
        self._closed = True
        self._agent.close()
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def aclose(self) -> None:
        """Ends it, and waits until the peer can write here no more and nobody checks what it wrote."""
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
            self._hub.receivers.grants.open(self._peer, self._conversation.break_off)
            self._conversation.ready(endpoint)

    async def _end(self) -> None:
        await self._starting
        await self._agent.aclose()
        await asyncio.gather(*map(asyncio.wrap_future, list(self._checking)))
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
            self._conversation.break_off(str(error))
            return
        if isinstance(message, link.Closed):
            self._hub.receivers.on_closed(self._peer, message.grants)
            self._hub.settle()
        else:
            future = self._checkers.submit(self._check, message)
            self._checking.add(future)
            future.add_done_callback(self._checking.discard)

    def broken(self, detail: str) -> None:
        """See AgentListener."""
        if not self._closed:
            logger.warning("NIXL path from depot %s: %s", self._peer, detail)
            self._conversation.break_off(detail)

    def _check(self, batch: link.Batch) -> None:
        """Runs in a thread."""
        landed: list[Landed] = []
        number: int | None = batch.batch
        try:
            for run in batch.runs:
                self._hub.inbox.check(self._peer, run, landed)
        except ProtocolError as error:
            number = None
            self._mailbox.post(self._conversation.break_off, str(error))
        finally:
            self._mailbox.post(self._conversation.batch, number, landed)
