"""Running a benchmark so that Ctrl-C and SIGTERM end it in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end. SIGINT and SIGTERM cancel it, so that it cleans up; then raises KeyboardInterrupt."""
    return asyncio.run(_until_signal(work))


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
