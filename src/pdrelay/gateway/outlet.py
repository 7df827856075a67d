"""What a request shows, between the callbacks that bring it and the one who iterates over it."""

from __future__ import annotations

import asyncio
from collections import deque

from pdrelay.gateway.base import TokenBatch


class Outlet:
    """Batches for one reader, who wakes for nothing else than a batch, a failure or the end."""

    def __init__(self) -> None:
        self._batches: deque[TokenBatch] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def awaited(self) -> bool:
        """Whether the reader waits, and still has nothing to wake for."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def closed(self) -> bool:
        """Whether nothing more is to come."""
        return self._ended or self._failure is not None

    @property
    def ready(self) -> bool:
        """Whether `take` may be called."""
        return bool(self._batches) or self.closed

    def put(self, batch: TokenBatch) -> None:
        """A batch is to be shown."""
        self._batches.append(batch)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """The reader gets `failure` behind all batches."""
        self._failure = failure
        self._wake()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._wake()

    async def wait(self) -> None:
        """Until it is `ready`, which it is not now."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> TokenBatch | None:
        """The next batch, None at the end. Raises the failure, once."""
        if self._batches:
            return self._batches.popleft()
        if self._failure is not None:
            raise self._taken()
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _taken(self) -> Exception:
        """The failure, which is not kept: its traceback leads back here, and nothing would be freed."""
        failure, self._failure, self._ended = self._failure, None, True
        assert failure is not None
        return failure
