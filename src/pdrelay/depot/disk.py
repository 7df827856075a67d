"""The file below the arena: room for bytes, and threads that read and write it.

The file is unlinked as soon as it is open, so nothing of it outlives the depot. It is preallocated: a disk that is full
says so at the start, not in the middle of work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pdrelay.errors import StartError

logger = logging.getLogger(__name__)

THREADS = 4

Work = Callable[[], bool]
Done = Callable[[bool | OSError], None]


class Disk(Protocol):
    """`capacity` bytes, 0 when there is no disk tier. Why there is none, if one was wanted, is in `trouble`."""

    @property
    def capacity(self) -> int:
        """Bytes."""
        ...

    @property
    def trouble(self) -> str:
        """Why it cannot be used; empty when it can, and when none was asked for."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into`. Blocks. Raises OSError."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`. Blocks. Raises OSError."""
        ...

    def run(self, work: Work, done: Done) -> None:
        """Runs `work`, which may block, elsewhere; then `done` on the hub's thread with its result or OSError."""
        ...

    def close(self) -> None:
        """Ends all work and gives the room back."""
        ...


class NoDisk:
    """A depot without a disk tier."""

    capacity = 0

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble

    def read(self, offset: int, into: memoryview) -> None:
        """Nothing can be read."""
        raise OSError("there is no disk tier")

    def write(self, offset: int, data: memoryview) -> None:
        """Nothing can be written."""
        raise OSError("there is no disk tier")

    def run(self, work: Work, done: Done) -> None:
        """Never called: nothing is here to be read or written."""

    def close(self) -> None:
        """Nothing to close."""


class FileDisk:
    """`size` bytes in a file at `path`. Needs a running event loop, which `done` is called on.

    Raises StartError when a file is there already, OSError when the room cannot be had.
    """

    trouble = ""

    def __init__(self, path: Path, size: int) -> None:
        self.capacity = size
        self._fd = _open_unlinked(path)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError:
            os.close(self._fd)
            raise
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pdrelay-disk")
        self._closed = False

    def read(self, offset: int, into: memoryview) -> None:
        """See Disk."""
        while into:
            got = os.preadv(self._fd, [into], offset)
            if not got:
                raise OSError(f"the file ends at byte {offset}")
            into, offset = into[got:], offset + got

    def write(self, offset: int, data: memoryview) -> None:
        """See Disk."""
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def run(self, work: Work, done: Done) -> None:
        """See Disk."""
        if not self._closed:
            self._threads.submit(self._run, work, done)

    def close(self) -> None:
        """See Disk. Waits for reads and writes under way."""
        self._closed = True
        self._threads.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _run(self, work: Work, done: Done) -> None:
        result: bool | OSError
        try:
            result = work()
        except OSError as error:
            result = error
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(done, result)


def open_disk(path: str, size: int) -> Disk:
    """The disk tier at `path`. One that cannot be had leaves the depot without: that costs hits, not service.

    Raises StartError when there is a file at `path`.
    """
    try:
        return FileDisk(Path(path), size)
    except OSError as error:
        logger.error("no disk tier: %s: %s", path, error.strerror or error)
        return NoDisk(f"{path}: {error.strerror or error}")


def _open_unlinked(path: Path) -> int:
    """A new file that has no name any more. Raises StartError, OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            raise StartError(f"disk.path: {path} exists; name a file that the depot may make, or remove it") from None
        path.unlink()  # a depot was killed between these two lines
        fd = os.open(path, flags, 0o600)
    path.unlink()
    return fd
