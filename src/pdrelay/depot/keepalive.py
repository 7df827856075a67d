"""Signs of life on a control connection: a process that is stopped, rather than dead, keeps its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from pdrelay.errors import DepotUnavailableError

PING_SECONDS, MAX_SILENT = 1.5, 2
"""A depot that says nothing for so many pings in a row is taken for dead."""


class KeepAlive:
    """Watches one connection; `ping` makes the next frame to send, which the other side must answer."""

    def __init__(self, writer: asyncio.StreamWriter, ping: Callable[[], bytes]) -> None:
        self._writer, self._ping = writer, ping
        self._heard = False  # since the last ping

    def heard(self) -> None:
        """Something came from the other side."""
        self._heard = True

    async def run(self, *work: Coroutine[object, object, None]) -> None:
        """Pings while `work` runs. Raises what that ended with; DepotUnavailableError once nothing is heard."""
        tasks = [asyncio.create_task(self._watch()), *map(asyncio.create_task, work)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()]  # the watch first: it knows why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in ended:
            task.result()

    async def _watch(self) -> None:
        silent = 0
        while silent < MAX_SILENT:  # counted, not timed: this process may be the one that was stopped
            self._heard = False
            self._writer.write(self._ping())
            await asyncio.sleep(PING_SECONDS)
            silent = 0 if self._heard else silent + 1
        self._writer.transport.abort()  # nobody is there to say goodbye to
        raise DepotUnavailableError(f"no answer for {MAX_SILENT * PING_SECONDS:g} s")
