"""What a link tells of itself: looks at its lanes a few times a second, and sums it up as a `LinkEstimate`."""

from __future__ import annotations

from pdrelay.depot.base import LinkEstimate
from pdrelay.depot.lanes import LaneUse
from pdrelay.depot.line_estimate import LineEstimate
from pdrelay.depot.link_messages import Stats
from pdrelay.depot.tcp_info import TcpInfo

LOOK_SECONDS = 0.25
LOOKS = 4
"""Looks that one estimate sums up."""


class LinkMonitor:
    """One link's. Pure: `look` is called every LOOK_SECONDS."""

    def __init__(self, to: str, line: LineEstimate) -> None:
        self._to, self._line = to, line
        self._busy: list[float] = []
        self._lanes = 0
        self.fresh_lanes = False  # connections came since the last look but one
        self._connections: tuple[TcpInfo, ...] = ()
        self._before = (0, 0)  # bytes sent and sent again on the present connections, at the last estimate
        self._loss = 0.0
        self.retransmitted_bytes = 0
        self.far = Stats(0, 0, 0)  # as the far depot told last

    def look(self, use: LaneUse) -> None:
        """Takes note of the lanes as they are now."""
        self._busy = [*self._busy[1 - LOOKS :], use.busy / use.lanes if use.lanes else 0.0]
        self.fresh_lanes = use.lanes > self._lanes
        self._lanes, self._connections = use.lanes, use.connections
        sent = sum(info.sent_bytes for info in use.connections)
        again = sum(info.retransmitted_bytes for info in use.connections)
        if sent < self._before[0] or again < self._before[1]:  # a connection was made anew
            self._before = (0, 0)
        fresh, lost = sent - self._before[0], again - self._before[1]
        self._before = (sent, again)
        self.retransmitted_bytes += lost
        self._line.on_connections(min((info.min_rtt for info in use.connections if info.min_rtt), default=0.0))
        if fresh:
            self._loss += (lost / fresh - self._loss) / LOOKS

    def estimate(self, queued: int, background: int, ratio: float) -> LinkEstimate:
        """The link now; `queued` and `background` are the bytes that each class has left to send.

        `ratio` is of bytes of KV to bytes on the line.
        """
        rtts = [info.rtt for info in self._connections]
        return LinkEstimate(
            to=self._to,
            rate=self._line.rate,
            measured=self._line.measured,
            ratio=ratio,
            rtt=self._line.rtt,
            base_rtt=self._line.base_rtt,
            tcp_rtt=sum(rtts) / len(rtts) if rtts else 0.0,
            loss=self._loss,
            retransmitted_bytes=self.retransmitted_bytes,
            queued=queued,
            queued_background=background,
            lanes=self._lanes,
            busy=sum(self._busy) / len(self._busy) if self._busy else 0.0,
            far_room=self.far.room,
            far_waiting=self.far.waiting,
            far_corrupt=self.far.corrupt,
        )
