"""How far the transfers of a depot are, and how long the rest of each will take."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from pdrelay.depot.base import Progress
from pdrelay.depot.outbox import Sending
from pdrelay.depot.schedule import Schedule


class Line(NamedTuple):
    """What a line carries now, and who waits for it."""

    rate: float  # bytes per second
    rtt: float  # seconds
    schedule: Schedule
    waiting: Collection[Sending]

    def seconds(self, sending: Sending, rest: int, now: float) -> float:
        """Until `rest` bytes of `sending` are across."""
        ahead = self.schedule.ahead(sending, self.waiting, now, self.rate) if sending in self.waiting else 0
        return (ahead + rest) / self.rate + self.rtt / 2


def progress_of(sendings: Collection[Sending], line: Line | None, now: float) -> Iterator[Progress]:
    """Of transfers that take the same way; `line` None: there is none now."""
    for sending in sendings:
        done = sending.total if sending.delivered else min(sending.saved + sending.sent, sending.total)
        rest = 0 if sending.delivered else max(sending.remaining, sending.total - done)
        yield Progress(
            xfer=sending.transfer.xfer,
            to=sending.transfer.to,
            age=now - sending.started,
            done=done,
            total=sending.total,
            absent=len(sending.absent),
            background=sending.background,
            delivered=sending.delivered,
            seconds=None if line is None else line.seconds(sending, rest, now) if rest else 0.0,
        )
