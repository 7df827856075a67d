"""How threads tell the event loop what they did: in order, and many at one wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """Runs on the event loop what threads `post`, then `settle`. Make it on the loop's thread."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        """`settle` runs once after all that one wake-up brought."""
        self._loop = asyncio.get_running_loop()
        self._settle = settle
        self._posted: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._waking = False

    def post(self, action: Callable[..., None], *arguments: object) -> None:
        """Runs `action` soon. From any thread; does nothing when the loop is closed."""
        self._posted.append((action, arguments))
        if not self._waking:  # two threads may both see that nobody has: one wake-up too many does no harm
            self._waking = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._waking = False  # first: what is posted from here on wakes the loop again
        try:
            while self._posted:
                action, arguments = self._posted.popleft()
                action(*arguments)
        finally:
            if self._posted:  # an action failed: the rest must not wait for the next post
                self._loop.call_soon(self._run)
            if self._settle is not None:
                self._settle()
