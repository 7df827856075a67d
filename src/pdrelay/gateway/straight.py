"""The short way of tokens: from the engine's connection to the client's socket in one call."""

from __future__ import annotations

import msgspec

from pdrelay.gateway.direct import Direct
from pdrelay.gateway.frames import Frames
from pdrelay.gateway.metrics import Meter
from pdrelay.gateway.output import Output


class Straight:
    """A `Sink` for a stream of one choice whose chunks are text alone and that no stop string can end."""

    def __init__(self, output: Output, frames: Frames, direct: Direct, meter: Meter) -> None:
        self._output, self._direct, self._meter = output, direct, meter
        self._write_quoted = direct.between(*frames.around(0))

    def take(self, index: int, ids: list[int]) -> bool:
        """See Sink."""
        if not self._direct.ready():
            return False
        self._meter.more(len(ids))
        if len(ids) == 1 and (quoted := self._output.quick(ids[0])) is not None:
            self._write_quoted(quoted)
        elif text := self._output.push(ids):
            self._write_quoted(msgspec.json.encode(text))
        return True
