"""The disk tier's file in memory: reads and writes are done at once, or one at a time as a test says."""

from __future__ import annotations

from collections import deque

from pdrelay.depot.disk import Done, Work


class MemoryDisk:
    """A Disk. What is asked of it is done by `step`; unless it is `stepped` its depot does so after each call."""

    trouble = ""

    def __init__(self, capacity: int, *, stepped: bool = False) -> None:
        self.capacity, self.stepped = capacity, stepped
        self.data = bytearray(capacity)
        self.broken = False  # every read and write fails
        self._waiting: deque[tuple[Work, Done]] = deque()

    @property
    def waiting(self) -> int:
        """Reads and writes that were asked for and not done."""
        return len(self._waiting)

    def read(self, offset: int, into: memoryview) -> None:
        """See Disk."""
        self._check()
        into[:] = self.data[offset : offset + len(into)]

    def write(self, offset: int, data: memoryview) -> None:
        """See Disk."""
        self._check()
        self.data[offset : offset + len(data)] = data

    def run(self, work: Work, done: Done) -> None:
        """See Disk."""
        self._waiting.append((work, done))

    def step(self) -> bool:
        """Does the oldest read or write; False when there is none."""
        if not self._waiting:
            return False
        work, done = self._waiting.popleft()
        try:
            done(work())
        except OSError as error:
            done(error)
        return True

    def close(self) -> None:
        """See Disk."""
        self._waiting.clear()

    def _check(self) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
