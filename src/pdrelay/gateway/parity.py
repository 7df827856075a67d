"""Cache parity: how far the prefix cache of main decode lags behind that of prefill, by the hour.

What prefill finds of a prompt need not be computed; what main decode's side lacks of it must cross the line. When
requests end on the relay and their pages never land at main decode, the two drift apart, and the relay fills up (PDD).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

HOUR_SECONDS = 3600


@dataclass(slots=True)
class Hour:
    """Tokens of the prompts of one hour."""

    number: int  # hours since 1970
    prompt: int = 0
    prefill: float = 0.0  # found by prefill, in its own cache or its depot
    main: float = 0.0  # found at main decode, in its own cache or its depot, when the request was placed

    @property
    def parity(self) -> float:
        """Prefill's hit rate less main decode's; 0 is best, and of an hour without requests."""
        return (self.prefill - self.main) / self.prompt if self.prompt else 0.0


class CacheParity:
    """Of the running hour, and of the last full one."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running, self._last = Hour(self._now()), Hour(self._now() - 1)

    def observe(self, prompt: int, prefill: float, main: float) -> None:
        """A prompt of so many tokens, with the hit rates of both sides."""
        self._turn()
        self._running.prompt += prompt
        self._running.prefill += prefill * prompt
        self._running.main += main * prompt

    def running(self) -> float:
        """Parity of the hour so far."""
        self._turn()
        return self._running.parity

    def last(self) -> float:
        """Parity of the last full hour."""
        self._turn()
        return self._last.parity

    def _now(self) -> int:
        return int(self._clock() // HOUR_SECONDS)

    def _turn(self) -> None:
        now = self._now()
        if now != self._running.number:
            # An hour in which nothing was asked had no requests: it is not the one before it.
            self._last = self._running if self._running.number == now - 1 else Hour(now - 1)
            self._running = Hour(now)
