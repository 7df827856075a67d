"""One direction of a shaped line: a rate, a delay, control ahead of bulk, turns between bulk flows.

Times are virtual: a piece departs when the piece before it has left, however late the event loop wakes, so the rate
holds exactly over time and the loop's timer error (up to a millisecond) shows once a piece, on arrival.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MIN_TURN, MAX_TURN = 4 << 10, 64 << 10
"""Bytes that a flow may send before the next has its turn; control waits for at most one turn."""

_TURN_SECONDS = 1e-3
_TIMER_ERROR = 0.5e-3  # the event loop wakes up to 1 ms late: aim half of that early


class Lane(enum.Enum):
    """Class of a connection."""

    CONTROL = "control"
    BULK = "bulk"


class Signal(enum.Enum):
    """What travels besides bytes: the sender's half-close, in order, or a broken connection, ahead of its data."""

    END = "end"
    RESET = "reset"


Piece = memoryview | Signal


class Flow:
    """One direction of one connection. `pending` bytes were taken from the sender and have not arrived."""

    def __init__(self, lane: Lane, arrive: Callable[[Piece], None]) -> None:
        self.lane, self.arrive = lane, arrive
        self.queue: deque[Piece] = deque()
        self.pending = 0


class _Travelling(NamedTuple):
    arrival: float
    flow: Flow
    piece: Piece


class Shaper:
    """One direction of the line. `rate` is in bytes per second, math.inf for no limit; `delay` in seconds.

    INV-LINE-1: the pieces of a flow arrive in the order in which they were put, once.
    INV-LINE-2: no bulk piece departs while a control piece waits.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self.rate, self.delay = rate, delay
        self.sent = dict.fromkeys(Lane, 0)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Lane, deque[Flow]] = {lane: deque() for lane in Lane}
        self._travelling: deque[_Travelling] = deque()
        self._free_at = 0.0  # when the last departed piece has left
        self._departure: asyncio.TimerHandle | None = None
        self._arrival: asyncio.TimerHandle | None = None

    @property
    def turn(self) -> int:
        """Bytes of one turn at the present rate."""
        return int(max(MIN_TURN, min(MAX_TURN, self.rate * _TURN_SECONDS)))

    @property
    def waiting(self) -> int:
        """Flows with something that has not departed."""
        return sum(len(flows) for flows in self._waiting.values())

    def put(self, flow: Flow, piece: Piece) -> None:
        """Takes a piece from the flow's sender."""
        now = self._loop.time()
        if not isinstance(piece, Signal):
            flow.pending += len(piece)
        if piece is Signal.RESET:
            self._forget_queue(flow)
        self._depart(now)
        if not self.waiting:
            self._free_at = max(self._free_at, now)
        if not flow.queue:
            self._waiting[flow.lane].append(flow)
        flow.queue.append(piece)
        self._depart(now)
        self._arrive(now)

    def set(self, rate: float | None = None, delay: float | None = None) -> None:
        """Changes rate or delay for what departs from now on."""
        now = self._loop.time()
        self._depart(now)
        if rate is not None:
            self.rate = rate
            self._free_at = min(self._free_at, now)
        if delay is not None:
            self.delay = delay
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
        self._depart(now)
        self._arrive(now)

    def close(self) -> None:
        """Drops everything."""
        for timer in (self._departure, self._arrival):
            if timer is not None:
                timer.cancel()
        self._travelling.clear()
        for flows in self._waiting.values():
            flows.clear()

    def _forget_queue(self, flow: Flow) -> None:
        flow.pending -= sum(len(piece) for piece in flow.queue if not isinstance(piece, Signal))
        flow.queue.clear()
        if flow in self._waiting[flow.lane]:
            self._waiting[flow.lane].remove(flow)

    def _depart(self, now: float) -> None:
        while self._free_at <= now:
            flows = self._waiting[Lane.CONTROL] or self._waiting[Lane.BULK]
            if not flows:
                return
            flow = flows.popleft()
            self._send_turn(flow)
            if flow.queue:
                flows.append(flow)
        if self._departure is None and self.waiting:
            self._departure = self._loop.call_at(self._free_at, self._on_departure)

    def _send_turn(self, flow: Flow) -> None:
        room = self.turn
        while room > 0 and flow.queue:
            piece = flow.queue.popleft()
            if not isinstance(piece, Signal):
                if len(piece) > room:
                    flow.queue.appendleft(piece[room:])
                    piece = piece[:room]
                room -= len(piece)
                self.sent[flow.lane] += len(piece)
                if not math.isinf(self.rate):
                    self._free_at += len(piece) / self.rate
            # After the delay was lowered, later pieces must still not overtake earlier ones.
            earliest = self._travelling[-1].arrival if self._travelling else 0.0
            self._travelling.append(_Travelling(max(earliest, self._free_at + self.delay), flow, piece))

    def _arrive(self, now: float) -> None:
        while self._travelling and self._travelling[0].arrival <= now + _TIMER_ERROR:
            _, flow, piece = self._travelling.popleft()
            if not isinstance(piece, Signal):
                flow.pending -= len(piece)
            flow.arrive(piece)
        if self._arrival is None and self._travelling:
            self._arrival = self._loop.call_at(self._travelling[0].arrival - _TIMER_ERROR, self._on_arrival)

    def _on_departure(self) -> None:
        self._departure = None
        now = self._loop.time()
        self._depart(now)
        self._arrive(now)

    def _on_arrival(self) -> None:
        self._arrival = None
        self._arrive(self._loop.time())
