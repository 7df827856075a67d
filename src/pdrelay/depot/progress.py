"""How far the transfers of a depot are, and how long the rest of each will take."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from pdrelay.depot.base import Progress
from pdrelay.depot.outbox import Sending
from pdrelay.depot.schedule import Schedule


class Line(NamedTuple):
    """What a line carries now, and whom first."""

    rate: float  # bytes per second
    rtt: float  # seconds
    schedule: Schedule


def progress_of(sendings: Collection[Sending], line: Line | None, now: float) -> Iterator[Progress]:
    """Of all transfers that take one way; `line` None: there is none now."""
    waiting = [sending for sending in sendings if sending.have is not None and not sending.delivered]
    ahead = dict(line.schedule.ahead(waiting, now, line.rate)) if line is not None else {}
    for sending in sendings:
        done = sending.total if sending.delivered else min(sending.saved + sending.sent, sending.total)
        rest = 0 if sending.delivered else max(sending.remaining, sending.total - done)
        seconds = None if line is None else 0.0
        if line is not None and rest:
            seconds = (ahead.get(sending, 0) + rest) / line.rate + line.rtt / 2
        yield Progress(
            xfer=sending.transfer.xfer,
            to=sending.transfer.to,
            age=now - sending.started,
            done=done,
            total=sending.total,
            absent=len(sending.absent),
            background=sending.background,
            delivered=sending.delivered,
            seconds=seconds,
        )
