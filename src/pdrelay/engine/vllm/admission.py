"""How many sessions may hold KV blocks between chunks.

A session that waits for its next chunk keeps its blocks, and vLLM cannot take them away. Several such sessions that all
need one block more, and no block free, would wait for each other for ever. So what they hold together stays below a
share of the KV cache; the rest is for requests that vLLM may preempt. A session that has taken over is one of those.

INV-ADMIT-1: sessions that wait for chunks hold no more than their share, unless it is one alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from pdrelay.errors import EngineRejectedError

OPEN_SHARE, GROWN_SHARE = 0.5, 0.75
"""Of the KV cache: up to which sessions are opened, and up to which they may grow by extends."""


class Budget(NamedTuple):
    """What an engine has."""

    tokens: int  # of the KV cache
    block_tokens: int
    sequences: int  # that it runs at once; sessions that wait count


class Hold:
    """What one session holds. `release` as soon as vLLM may preempt it, or it has ended."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.tokens = admission, 0

    def grow(self, tokens: int) -> None:
        """The session will have `tokens` tokens. Raises EngineRejectedError when there is no room: it must go."""
        self._admission.grow(self, tokens)

    def release(self) -> None:
        """Holds nothing any more. Idempotent."""
        self._admission.release(self)


class Admission:
    """First come, first admitted."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._sessions = max(1, budget.sequences // 2)
        self._held: set[Hold] = set()
        self._waiters: deque[tuple[int, Hold, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Sessions that wait to be admitted."""
        return len(self._waiters)

    @property
    def held(self) -> int:
        """Tokens of all sessions that wait for chunks, in whole blocks."""
        return sum(hold.tokens for hold in self._held)

    async def admit(self, tokens: int) -> Hold:
        """Waits until a session of `tokens` tokens may be opened."""
        hold, admitted = Hold(self), asyncio.get_running_loop().create_future()
        waiter = (self._whole(tokens), hold, admitted)
        self._waiters.append(waiter)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.release(hold)
            raise
        return hold

    def grow(self, hold: Hold, tokens: int) -> None:
        """See Hold."""
        wanted = self._whole(tokens)
        others = self.held - hold.tokens
        if others and others + wanted > GROWN_SHARE * self._budget.tokens:
            raise EngineRejectedError("no room in the KV cache for a session that waits for chunks", 503)
        hold.tokens = max(hold.tokens, wanted)

    def release(self, hold: Hold) -> None:
        """See Hold."""
        self._held.discard(hold)
        self._admit()

    def _admit(self) -> None:
        while self._waiters:
            tokens, hold, admitted = self._waiters[0]
            fits = self.held + tokens <= OPEN_SHARE * self._budget.tokens and len(self._held) < self._sessions
            if self._held and not fits:
                return
            self._waiters.popleft()
            hold.tokens = tokens
            self._held.add(hold)
            admitted.set_result(None)

    def _whole(self, tokens: int) -> int:
        """In whole blocks, with one more for the token that is sampled."""
        size = self._budget.block_tokens
        return -(-(tokens + 1) // size) * size
