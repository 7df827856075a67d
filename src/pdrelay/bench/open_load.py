"""An open load: requests are sent when they are due, whatever has become of those before them.

Latencies therefore count from the moment at which a request was due. What the generator itself was late by is the
request's lag; it is part of the latency, so that a slow generator never makes a server look better than it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

from pdrelay.bench.answers import Answer, now
from pdrelay.workload.base import Request

AHEAD = 64
"""Requests whose bodies are made before they are due."""
UNDISTURBED = 0.005
"""Seconds before a request is due in which no body is made."""

Send = Callable[[Answer], Awaitable[None]]
"""Sends one request, whose body is made, and fills the answer. Raises CancelledError only."""
Prepare = Callable[[int, Request], Send]
"""Makes the body of a request with a number."""


class Sent(NamedTuple):
    """A request that has ended, one way or the other. Moments are of `answers.now`."""

    number: int
    request: Request
    turn: int  # of its session
    due: float
    answer: Answer

    @property
    def lag(self) -> float:
        """Seconds by which it was sent late."""
        return self.answer.sent - self.due if self.answer.sent else float("nan")


class Pace(NamedTuple):
    """How a workload is played."""

    speed: float = 1.0  # arrivals come, and think times pass, so many times faster than written
    at_once: int = 0  # most requests at a time, the others wait although they are due; 0: no limit


class _Ready(NamedTuple):
    """A request whose body is made."""

    number: int
    request: Request
    send: Send


class OpenLoad:
    """Plays a workload."""

    def __init__(self, prepare: Prepare, pace: Pace, on_end: Callable[[Sent], None]) -> None:
        self._prepare, self._pace, self._on_end = prepare, pace, on_end
        self._slots = asyncio.Semaphore(pace.at_once) if pace.at_once else nullcontext()
        self._ahead: deque[_Ready] = deque()
        self._numbers = 0
        self.started = 0.0  # when a request with arrival 0 is due
        self.running = self.most_running = self.sent = self.skipped = 0
        """`skipped`: turns that were never due, because the turn before them failed."""

    async def run(self, requests: Iterable[Request]) -> None:
        """Sends all requests, arrivals rising, and the turns that follow them; returns when all have ended.

        When cancelled, what is under way is cancelled and reported as interrupted.
        """
        source = iter(requests)
        async with asyncio.TaskGroup() as group:
            await self._make_ahead(source)
            self.started = now()
            while self._ahead:
                ready = self._ahead.popleft()
                due = self._due(ready)
                await _until(due)
                group.create_task(self._session(ready, due))
                await self._make_ahead(source)

    async def _make_ahead(self, source: Iterator[Request]) -> None:
        """Makes bodies while there is time, one at least if none is ready."""
        while len(self._ahead) < AHEAD and self._has_time():
            request = next(source, None)
            if request is None:
                return
            self._ahead.append(self._make(request))
            await asyncio.sleep(0)

    def _has_time(self) -> bool:
        return not self._ahead or not self.started or self._due(self._ahead[0]) - now() > UNDISTURBED

    def _due(self, ready: _Ready) -> float:
        return self.started + ready.request.arrival / self._pace.speed

    def _make(self, request: Request) -> _Ready:
        number = self._numbers
        self._numbers += 1
        return _Ready(number, request, self._prepare(number, request))

    async def _session(self, ready: _Ready, due: float) -> None:
        """A request, and the turns that wait for one another after it."""
        turn = 0
        while True:
            answer = await self._one(ready, turn, due)
            following = ready.request.then
            if following is None:
                return
            if answer.error:
                self.skipped += sum(1 for _ in following.turns())
                return
            ready, turn, due = self._make(following), turn + 1, answer.ended + following.think / self._pace.speed
            await _until(due)

    async def _one(self, ready: _Ready, turn: int, due: float) -> Answer:
        answer = Answer()
        answer.error = "interrupted"  # unless it gets its turn
        try:
            async with self._slots:
                answer.error = ""
                self.sent += 1
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                try:
                    await ready.send(answer)
                finally:
                    self.running -= 1
        finally:
            self._on_end(Sent(ready.number, ready.request, turn, due, answer))
        return answer


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - now()))
