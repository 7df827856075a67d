"""The event queue: moments in order, ties in the order in which they were set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[], None]


class Event:
    """Something that will happen. `cancel` leaves it in the queue, where it is skipped."""

    __slots__ = ("action", "time")

    def __init__(self, time: float, action: Action) -> None:
        self.time, self.action = time, action  # type: float, Action | None

    def cancel(self) -> None:
        """Makes it not happen."""
        self.action = None


class Events:
    """A simulated clock. INV-SIM-TIME: it never goes back."""

    __slots__ = ("_heap", "now", "set")

    def __init__(self) -> None:
        self.now = 0.0
        self.set = 0  # events set so far
        self._heap: list[tuple[float, int, Event]] = []

    @property
    def pending(self) -> bool:
        """True while something is in the queue."""
        return bool(self._heap)

    def at(self, time: float, action: Action) -> Event:
        """Calls `action` at `time`, which is not in the past."""
        assert time >= self.now, f"INV-SIM-TIME: {time} is before {self.now}"
        event = Event(time, action)
        self.set += 1
        heapq.heappush(self._heap, (time, self.set, event))
        return event

    def after(self, seconds: float, action: Action) -> Event:
        """Calls `action` in `seconds`."""
        return self.at(self.now + seconds, action)

    def run(self, until: float = float("inf"), stop: Callable[[], Any] = lambda: False) -> None:
        """Lets time pass until nothing is left, `until` is reached or `stop` says so after an event."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, event = heapq.heappop(heap)
            if event.action is None:
                continue
            self.now = time
            event.action()
            if stop():
                return
