"""What may be under way follows what the line carries. The line here is arithmetic: a rate, a delay, a queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import pytest

from pdrelay.depot.flow_control import MAX_BATCH, MIN_BATCH, FlowControl
from pdrelay.depot.line_estimate import LineEstimate

CONNECTIONS = 4


class SimulatedLine:
    """A sender with endless data before a line of `rate` and `rtt`, whose queue takes whatever it is given."""

    def __init__(self, rate: float, rtt: float, flow: FlowControl, *, proxied: bool) -> None:
        """Pings queue like data, unless the line is `proxied`: then it sends them ahead, and ends TCP."""
        self.rate, self.rtt, self.flow, self.proxied = rate, rtt, flow, proxied
        flow.estimate.on_connections(50e-6 if proxied else rtt)
        flow.estimate.on_ping(rtt, 0.0)  # a link is up before it has anything to send
        self.now = self.free = self.next_ping = 0.0
        self.delivered = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    @property
    def queue_seconds(self) -> float:
        """How long what is put on the line now waits."""
        return max(0.0, self.free - self.now)

    def run(self, seconds: float) -> float:
        """Runs for so long; the bytes per second that arrived."""
        end, before = self.now + seconds, self.delivered
        while True:
            self._fill()
            wait = self.flow.wait(self.now)
            event = self._events[0][0] if self._events else end
            following = min(event, self.now + wait if wait > 0 else end, self.next_ping)
            if following >= end:
                self.now = end
                return (self.delivered - before) / seconds
            self.now = following
            if self.now >= self.next_ping:
                self.next_ping = self.now + 0.5
                queue = 0.0 if self.proxied else self.queue_seconds
                self._at(self.now + self.rtt + queue, self._pong(self.now))
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()

    def _fill(self) -> None:
        while self.flow.room and self.flow.wait(self.now) <= 0:
            self._numbers += 1
            number, size = self._numbers, self.flow.batch_bytes
            self.flow.sent(number, size, self.now)
            self.free = max(self.free, self.now) + size / self.rate
            self._at(self.free + self.rtt, self._ack(number, size))
        self.flow.estimate.full(self.now)

    def _ack(self, number: int, size: int) -> Callable[[], None]:
        def arrive() -> None:
            self.delivered += size
            self.flow.acked(number, size, self.now)

        return arrive

    def _pong(self, left: float) -> Callable[[], None]:
        return lambda: self.flow.estimate.on_ping(self.now - left, self.now)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (when, self._numbers, what))


def line(
    rate: float, rtt: float, configured: float | None = None, pace: float | None = None, *, proxied: bool = False
) -> SimulatedLine:
    flow = FlowControl(LineEstimate(configured, 0.001), CONNECTIONS, pace)
    return SimulatedLine(rate, rtt, flow, proxied=proxied)


@pytest.mark.parametrize("rate", [1.25e6, 25e6, 1.25e9])
@pytest.mark.parametrize("rtt", [0.001, 0.03, 0.2])
@pytest.mark.parametrize("configured", [None, 1.25e9])
@pytest.mark.parametrize("proxied", [False, True])
def test_an_unknown_line_is_filled_within_seconds_and_not_beyond(
    rate: float, rtt: float, configured: float | None, proxied: bool
) -> None:
    sent = line(rate, rtt, configured, proxied=proxied)
    sent.run(5)
    assert sent.run(2) >= 0.97 * rate
    assert sent.flow.estimate.rate == pytest.approx(rate, rel=0.15)
    assert sent.flow.estimate.base_rtt == pytest.approx(rtt, rel=0.1)
    assert sent.queue_seconds <= 0.08 + 0.6 * rtt


def test_a_way_that_became_longer_is_noticed() -> None:
    sent = line(25e6, 0.01, proxied=True)
    sent.run(3)
    sent.rtt = 0.4
    sent.run(10)
    assert sent.run(2) >= 0.9 * sent.rate


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("rtt", [0.002, 0.2])
def test_a_step_of_the_rate_is_followed_within_seconds(factor: float, rtt: float) -> None:
    sent = line(25e6, rtt)
    sent.run(5)
    sent.rate *= factor
    sent.run(5)
    assert sent.run(1) >= 0.95 * sent.rate
    assert sent.queue_seconds <= 0.2 + rtt


def test_the_pace_is_kept_whatever_the_line_could_carry() -> None:
    sent = line(1.25e9, 0.01, configured=25e6, pace=25e6)
    assert sent.run(4) == pytest.approx(25e6, rel=0.02)


def test_little_data_does_not_make_a_line_look_slow() -> None:
    estimate = LineEstimate(1e9, 0.001)
    for number in range(100):
        estimate.full(number * 0.05)
        estimate.starved()
        estimate.on_ack(1000, number * 0.05)
    assert estimate.rate == 1e9


def test_of_a_line_that_becomes_slower_in_steps_each_rate_counts_for_as_long_as_it_is_the_largest() -> None:
    estimate, now = LineEstimate(None, 0.001), 0.0
    estimate.full(now)
    seen = []
    for rate, seconds in ((100e6, 1.0), (50e6, 0.4), (10e6, 1.2)):
        for _ in range(round(seconds / 0.01)):
            now += 0.01
            estimate.on_ack(int(rate * 0.01), now)
            seen.append(estimate.rate)
    assert seen[150] == pytest.approx(100e6), "half a second after it ended"
    assert seen[185] == pytest.approx(50e6), "when that had passed out of sight"
    assert seen[-1] == pytest.approx(10e6)
    assert seen[20:] == sorted(seen[20:], reverse=True)


def test_a_new_connection_starts_slowly() -> None:
    sent = line(1.25e9, 0.001)
    sent.run(2)
    large = sent.flow.window
    sent.flow.reset()
    assert sent.flow.window < large
    assert MIN_BATCH <= sent.flow.batch_bytes <= MAX_BATCH
