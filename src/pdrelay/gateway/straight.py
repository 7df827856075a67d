"""The short way of tokens: from the engine's connection to the client's socket in one call."""

from __future__ import annotations

from pdrelay.gateway.base import Tier
from pdrelay.gateway.direct import Direct
from pdrelay.gateway.frames import Frames
from pdrelay.gateway.metrics import Meter
from pdrelay.gateway.output import Output


class Straight:
    """A `Sink` for a stream of one choice whose chunks are text alone and that no stop string can end."""

    def __init__(self, output: Output, frames: Frames, direct: Direct, meter: Meter) -> None:
        self._output, self._frames, self._direct, self._meter = output, frames, direct, meter

    def take(self, index: int, ids: list[int], tier: Tier) -> bool:
        """See Sink."""
        if not self._direct.ready:
            return False
        self._meter.tokens(index, len(ids), tier)
        if text := self._output.push(ids):
            self._direct.write(self._frames.text(0, text))
        return True
