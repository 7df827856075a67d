"""How far the transfers of a link are, and how long the rest of each will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdrelay.depot.base import Progress
from pdrelay.depot.outbox import Sending
from pdrelay.depot.schedule import Schedule


class Line(NamedTuple):
    """What a line carries now."""

    rate: float  # bytes per second
    rtt: float  # seconds


def fresh_progress(sendings: Sequence[Sending], schedule: Schedule, line: Line, now: float) -> Iterator[Progress]:
    """Of those transfers of a link that got further since this was called last."""
    waiting = [sending for sending in sendings if sending.have is not None and not sending.delivered]
    for sending in waiting:
        done = min(sending.saved + sending.sent, sending.total)
        if sending.told is None or sending.told.done != done:
            rest = schedule.ahead(sending, waiting, now, line.rate) + max(sending.remaining, sending.total - done)
            seconds = rest / line.rate + line.rtt / 2
            sending.told = Progress(sending.transfer.xfer, done, sending.total, seconds)
            yield sending.told
