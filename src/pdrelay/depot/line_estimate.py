"""What a line can carry, measured from what it carried. Pure: the caller brings the clock.

The delivery rate counts only while the line is what limits it: as long as something waits for room. Meanwhile it may
rise and fall; when the sender has nothing more to send it may only rise.
"""

from __future__ import annotations

from collections import deque

from pdrelay.cluster.topology import FIRST_RATE

SAMPLE_SECONDS, HOLD_SECONDS = 0.1, 0.6
"""A rate is taken over so long, and counts for so long; longer on lines with a long round trip."""

RTT_SECONDS = 300.0
"""The shortest round trip of so long is the line's own: while the line is full, all later ones queue."""

STALE_PINGS, STALE_FACTOR, STALE_SECONDS = 4, 3.0, 0.2
"""So many pings in a row that take so many times as long, and so much longer, do not queue: the way has changed."""


class LineEstimate:
    """Rate and round-trip time of one direction of a line."""

    def __init__(self, rate: float | None, rtt: float) -> None:
        """`rate` (bytes/s, None unknown) and `rtt` (seconds) are what the configuration says."""
        self._configured = rate
        self._measured: float | None = None
        self.rtt = rtt  # smoothed
        self._ping_rtt = rtt  # the shortest
        self._kernel_rtt = 0.0  # the shortest that TCP saw; 0 when not known
        self._rtts: deque[tuple[float, float]] = deque()
        self._acks: deque[tuple[float, int]] = deque()  # when, and how much in all
        self._samples: deque[tuple[float, float]] = deque()  # those that no later one is above: rates fall
        self._acked = 0
        self._full_since: float | None = None  # something waits for room since then

    @property
    def measured(self) -> bool:
        """Whether `rate` comes from a measurement."""
        return self._measured is not None

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self._measured or self._configured or FIRST_RATE

    @property
    def base_rtt(self) -> float:
        """Seconds there and back without queueing."""
        # A proxy on the way ends TCP: then the kernel sees only the way to the proxy.
        known = self._kernel_rtt > self._ping_rtt / 4
        return min(self._kernel_rtt, self._ping_rtt) if known else self._ping_rtt

    @property
    def acked(self) -> int:
        """Bytes acknowledged in all."""
        return self._acked

    def full(self, now: float) -> None:
        """Something waits for room on the line."""
        if self._full_since is None:
            self._full_since = now

    def starved(self) -> None:
        """Nothing more is there to be sent."""
        self._full_since = None

    def lost(self) -> None:
        """The link went down: what comes after has nothing to do with what came before."""
        self._full_since = None
        self._acks.clear()

    def on_ack(self, size: int, now: float) -> None:
        """`size` bytes were acknowledged."""
        if not self._acks:
            self._acks.append((now, self._acked))
        self._acked += size
        self._acks.append((now, self._acked))
        window = max(SAMPLE_SECONDS, 2 * self.rtt)
        while len(self._acks) > 2 and self._acks[1][0] <= now - window:
            self._acks.popleft()
        self._sample(now, window)

    def on_ping(self, rtt: float, now: float) -> None:
        """A message of a few bytes took so long there and back."""
        self.rtt = rtt if not self._rtts else 0.75 * self.rtt + 0.25 * rtt
        self._rtts.append((now, rtt))
        while self._rtts[0][0] < now - RTT_SECONDS:
            self._rtts.popleft()
        self._ping_rtt = min(rtt for _, rtt in self._rtts)
        recent = [rtt for _, rtt in list(self._rtts)[-STALE_PINGS:]]
        if len(recent) == STALE_PINGS and min(recent) > STALE_FACTOR * self._ping_rtt + STALE_SECONDS:
            self._ping_rtt, self._kernel_rtt = min(recent), 0.0
            self._rtts = deque(list(self._rtts)[-STALE_PINGS:])

    def on_connections(self, min_rtt: float) -> None:
        """The shortest round trip that TCP saw on the present connections; 0 when it knows none."""
        self._kernel_rtt = min_rtt

    def _sample(self, now: float, window: float) -> None:
        (start, before), limited = self._acks[0], self._full_since
        seconds = now - start
        if seconds < window / 2:
            return
        rate = (self._acked - before) / seconds
        hold = max(HOLD_SECONDS, 4 * self.rtt)
        if limited is not None and limited <= start:
            self._keep(now, rate)
            while self._samples[0][0] < now - hold:
                self._samples.popleft()
            self._measured = self._samples[0][1]
        elif rate > self.rate:
            self._measured = rate
            self._keep(now, rate)

    def _keep(self, now: float, rate: float) -> None:
        """Adds a sample; earlier ones that are not above it can be the largest no more."""
        while self._samples and self._samples[-1][1] <= rate:
            self._samples.pop()
        self._samples.append((now, rate))
