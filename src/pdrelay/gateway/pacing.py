"""Holds tokens back, so that a pause of the engines cannot be seen in the reader's stream.

While Catch-Up runs, tokens are shown a little slower than the relay makes them until enough are held back; those fill
the pause of the switch. Then the stream catches up with MainDecode as gently.
"""

from __future__ import annotations

from collections import deque

from pdrelay.gateway.base import TokenBatch

CATCHING_UP = 0.8
"""After the switch tokens are shown in this share of their interval until none is held back."""


class Pacer:
    """A queue of single tokens with times of release, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._held: deque[TokenBatch] = deque()
        self._target = 0
        self._spacing = 0.0  # between tokens that are held; 0 when all go at once
        self._last = 0.0  # time of the last release

    @property
    def held(self) -> int:
        """Tokens that were put and not taken."""
        return len(self._held)

    @property
    def due(self) -> float | None:
        """When the next token is to be shown; None when none is held."""
        if not self._held:
            return None
        return self._last + self._spacing if len(self._held) <= self._target or not self._target else self._last

    def hold_back(self, target: int, spacing: float) -> None:
        """Keeps `target` tokens back; until so many are held one is shown every `spacing` seconds."""
        self._target, self._spacing = target, spacing

    def spread(self, seconds: float, interval: float) -> None:
        """Shows what is held evenly over the next `seconds`, but no faster than one every `interval`: what is left when
        new tokens come sooner is not lost, and a pause that lasts longer is shorter for it."""
        self._target = 0
        self._spacing = max(interval, seconds / (len(self._held) + 1)) if self._held else 0.0

    def catch_up(self, interval: float) -> None:
        """Tokens come again every `interval`: shows them faster than that until none is held."""
        self._target = 0
        self._spacing = interval * CATCHING_UP if self._held else 0.0

    def release(self) -> None:
        """Shows all that is held at once, and holds nothing any more."""
        self._target, self._spacing = 0, 0.0

    def put(self, batch: TokenBatch) -> None:
        """Tokens came."""
        self._held.extend(batch.split() if self._spacing or self._held else [batch])

    def take(self, now: float) -> TokenBatch | None:
        """The next tokens to show, None when none are due."""
        due = self.due
        if due is None or due > now:
            return None
        at_once = due == self._last
        batch = self._held.popleft()
        # From when it was due, or late timers would slow the stream down; but no burst after a long silence.
        self._last = now if at_once else max(due, now - self._spacing / 2)
        if not self._held and not self._target:
            self._spacing = 0.0
        return batch
