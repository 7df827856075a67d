"""Where the tokens of a gateway benchmark come from: one source behind every kind of engine endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

GROUPS = 2
"""Batches that step by themselves, as two engines would, so that one can be made while another is relayed."""


class Running:
    """One decoding stream. `emit` sends the token with the index that it is given."""

    def __init__(
        self, key: int, next_index: int, limit: int, emit: Callable[[int], None], drop: Callable[[], None] | None = None
    ) -> None:
        """`drop` is called when its client left and nobody ended it."""
        self.key, self.next, self.limit, self.emit, self.drop = key, next_index, limit, emit, drop


class Source:
    """Steps all running streams.

    With an `interval`, one step each interval, whoever has read what. Without, in lockstep: a group steps as soon as
    the clients of all its streams have read every token before, so no token can wait for another and be merged with it.
    """

    def __init__(self) -> None:
        self.interval = 0.0
        self.made: dict[int, float] = {}  # stream to the moment of its latest token, of this process's clock
        self._read: dict[int, int] = {}
        self._groups: list[dict[int, Running]] = [{} for _ in range(GROUPS)]
        self._behind = [0] * GROUPS  # streams whose client has not read all
        self._ticker: asyncio.Task[None] | None = None
        self._keys = self._oldest = 0  # keys up to the latter are of clients that have left

    def set_interval(self, interval: float) -> None:
        """Changes between stepping by the clock (seconds) and in lockstep (0). Streams begun before are dropped, late
        ones included: their clients have left, and in lockstep the others would wait for them."""
        left = [running for group in self._groups for running in group.values()]
        self._groups = [{} for _ in range(GROUPS)]
        self._behind = [0] * GROUPS
        self._oldest = self._keys
        for running in left:
            if running.drop is not None:
                running.drop()
        self.interval = interval
        self._read.clear()
        self.made.clear()
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = asyncio.create_task(self._tick()) if interval else None

    def next_key(self) -> int:
        """A number for a stream."""
        self._keys += 1
        return self._keys

    def start(self, running: Running) -> None:
        """Takes a stream into the next step; it takes the place of an older one with the same key."""
        if 0 < running.key <= self._oldest:
            return
        group = running.key % GROUPS
        self.stop(running.key)
        self._groups[group][running.key] = running
        if running.next > self._read.get(running.key, 0):
            self._behind[group] += 1
        self._consider(group)

    def stop(self, key: int, running: Running | None = None) -> None:
        """Ends a stream; with `running` only if that is the one under this key."""
        group = key % GROUPS
        found = self._groups[group].get(key)
        if found is None or running not in (None, found):
            return
        del self._groups[group][key]
        if found.next > self._read.get(key, 0):
            self._behind[group] -= 1
        self._consider(group)

    def read(self, key: int, tokens: int) -> None:
        """A client has read so many tokens of its stream."""
        before, self._read[key] = self._read.get(key, 0), tokens
        group = key % GROUPS
        running = self._groups[group].get(key)
        if running is not None and before < running.next <= tokens:
            self._behind[group] -= 1
            self._consider(group)

    def forget(self, key: int) -> None:
        """The client of a stream has all of it."""
        self._read.pop(key, None)
        self.made.pop(key, None)

    def _consider(self, group: int) -> None:
        if not self.interval and self._groups[group] and not self._behind[group]:
            asyncio.get_running_loop().call_soon(self._step_together, group)

    def _step_together(self, group: int) -> None:
        if not self._behind[group]:
            self._step(group)

    def _step(self, group: int) -> None:
        now, streams = time.perf_counter(), self._groups[group]
        for running in list(streams.values()):
            index, key = running.next, running.key
            read = self._read.get(key, 0)
            running.next = index + 1
            self.made[key] = now
            if running.next >= running.limit:
                del streams[key]
                self._behind[group] -= index > read
            else:
                self._behind[group] += (running.next > read) - (index > read)
            running.emit(index)

    async def _tick(self) -> None:
        due = time.perf_counter()
        while True:
            due += self.interval
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for group in range(GROUPS):
                self._step(group)
