"""Notices that vLLM does not get on although sessions wait for it, and ends the youngest of them.

With the admission budget vLLM's sessions cannot block each other. This is for what the budget does not foresee: blocks
held by requests that are not ours, a bug in vLLM's young session code. The gateway re-places what is ended from its
token ids. The session that has waited longest is never ended, so some request always gets on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pdrelay.errors import EngineRejectedError

_log = logging.getLogger(__name__)

PATIENCE: Final = 15.0
"""Seconds without any output while sessions wait, after which one is ended."""


class _Wait:
    """A session whose chunk is being computed, and the task that awaits it."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task, self.ended = task, False


class Watchdog:
    """Watches all sessions of an engine."""

    def __init__(self, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._waits: list[_Wait] = []  # longest first
        self._last = 0.0  # when any output came last, or the first began to wait
        self._loop: asyncio.Task[None] | None = None

    def progressed(self) -> None:
        """The engine gave some output."""
        self._last = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The current task awaits outputs of its session. Raises EngineRejectedError when the session is ended."""
        task = asyncio.current_task()
        assert task is not None
        wait = _Wait(task)
        if not self._waits:
            self.progressed()
            self._loop = asyncio.create_task(self._look())
        self._waits.append(wait)
        try:
            yield
        except asyncio.CancelledError:
            if not wait.ended:
                raise
            task.uncancel()
            raise EngineRejectedError("the engine does not get on: its youngest session was ended", 503) from None
        finally:
            self._waits.remove(wait)
            if not self._waits and self._loop is not None:
                self._loop.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._patience / 4)
            waits = [wait for wait in self._waits if not wait.ended]
            if len(waits) < 2:
                self.progressed()
            elif self._clock() - self._last >= self._patience:
                _log.error("no output for %.0f s while %d sessions wait: ending the youngest", self._patience,
                           len(waits))  # fmt: skip
                self.progressed()  # the others get a whole period again
                waits[-1].ended = True
                waits[-1].task.cancel()
