"""How much a link may have under way, in what pieces, and when the next may go. Pure: the caller brings the clock.

What is under way is bounded by what the line delivers in a round trip and a little more (`QUEUE_SECONDS`): the line is
never idle, and what is urgent does not queue behind much. The bound follows the measured rate: it lets half as much
again as a round trip's worth through, so a line that became faster is found out within a few round trips.
"""

from __future__ import annotations

from pdrelay.depot.line_estimate import LineEstimate

MIN_BATCH, MAX_BATCH = 16 << 10, 4 << 20
LARGE_BATCH = 16 << 20
"""At most, where much of one transfer is ready: a batch costs both event loops about as much whatever its size."""

BATCH_SECONDS = 0.01
"""A batch occupies its share of the line for about so long: what comes up meanwhile waits no longer."""

LARGE_SECONDS = 0.02
"""... one of a transfer that nothing else waits beside."""

URGENT_SECONDS = 0.02
"""What the whole line carries in so long may overtake what has not begun."""

SPREAD = 2
"""What is ready makes at least so many large batches for each connection: all have work until the end."""

LEAST_BATCHES = 2
"""Under way at least: one that is acknowledged while the next is sent."""

QUEUE_SECONDS = 0.015
RTT_GAIN = 1.5
FIRST_BYTES = 256 << 10
"""Under way before anything was acknowledged; then twice what was, as in TCP's slow start."""

BURST_SECONDS = 0.005


def seconds_ahead(rate: float, rtt: float, batch: int = MIN_BATCH) -> float:
    """How long a full line of `rate` bytes per second is busy with what is under way beyond its round trip: what is
    urgent comes behind it. `batch`: bytes of one."""
    # A slow line's smallest batch takes it long: one for each connection would be much to wait behind.
    batches = max(rate * BATCH_SECONDS, LEAST_BATCHES * batch)
    return (RTT_GAIN - 1) * rtt + QUEUE_SECONDS + batches / rate


class FlowControl:
    """One link's. Sizes are bytes on the line."""

    def __init__(self, estimate: LineEstimate, connections: int, pace: float | None) -> None:
        """`pace` is the highest rate, bytes per second; None for no limit."""
        self.estimate, self._connections, self._pace = estimate, connections, pace
        self._sizes: dict[int, int] = {}  # of batches under way
        self.under_way = 0
        self._base = estimate.acked
        self._next = 0.0

    @property
    def batch_bytes(self) -> int:
        """Size of the next batch, of whatever transfers."""
        return int(min(max(self._share(BATCH_SECONDS), MIN_BATCH), MAX_BATCH))

    @property
    def urgent_bytes(self) -> int:
        """A transfer of which no more is left may overtake others."""
        return max(self.batch_bytes, int(min(self.estimate.rate * URGENT_SECONDS, self._connections * MAX_BATCH)))

    def large_batch_bytes(self, ready: int) -> int:
        """Size of the next batch of the only transfer that waits, of which `ready` bytes could be sent now."""
        large = min(self._share(LARGE_SECONDS), LARGE_BATCH, ready / (SPREAD * self._connections))
        return max(self.batch_bytes, int(large))

    def _share(self, seconds: float) -> float:
        """Bytes that keep a connection busy for so long."""
        return min(self.estimate.rate * seconds, self._known / 2) / self._connections

    @property
    def window(self) -> int:
        """Most that may be under way."""
        rate, rtt = self.estimate.rate, self.estimate.base_rtt
        return int(min(rate * (rtt + seconds_ahead(rate, rtt, self.batch_bytes)), self._known))

    @property
    def _known(self) -> int:
        """Bytes that the line surely takes: a rate that nobody measured yet may be far too high."""
        return FIRST_BYTES + 2 * (self.estimate.acked - self._base)

    def wait(self, now: float) -> float:
        """Seconds until the next batch may go by the pace; at most 0 when it may now."""
        return self._next - now

    @property
    def room(self) -> bool:
        """Whether more may be under way."""
        return self.under_way < self.window

    def sent(self, batch: int, size: int, now: float) -> None:
        """A batch goes that will take about `size` bytes."""
        self._sizes[batch] = size
        self.under_way += size
        if self._pace is not None:
            self._next = max(self._next, now - BURST_SECONDS) + size / self._pace

    def acked(self, batch: int, size: int, now: float) -> None:
        """A batch arrived. It took `size` bytes."""
        self.under_way -= self._sizes.pop(batch)
        self.estimate.on_ack(size, now)

    def failed(self, batch: int) -> None:
        """A batch was lost with its connection."""
        self.under_way -= self._sizes.pop(batch)

    def reset(self) -> None:
        """The link is new: starts slowly again."""
        self.estimate.lost()
        self._base = self.estimate.acked
