"""The longest of an engine's steps since a given one: the largest gap that a sequence has seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

KEPT = 4096
"""Segments that are remembered before those that nobody can have seen are forgotten."""


class Gaps:
    """Last steps of segments, and their longest step: only those that no later one exceeds, so they fall."""

    __slots__ = ("_ends", "_steps")

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._steps: list[float] = []

    def note(self, longest: float, end: int, oldest: Callable[[], int]) -> None:
        """A segment whose longest step took `longest` seconds ended with step `end`.

        `oldest` tells the first step that any running sequence has seen.
        """
        ends, steps = self._ends, self._steps
        while steps and steps[-1] <= longest:
            steps.pop()
            ends.pop()
        steps.append(longest)
        ends.append(end)
        if len(ends) > KEPT:
            keep = bisect_right(ends, oldest())
            self._ends, self._steps = ends[keep:], steps[keep:]

    def longest_since(self, step: int) -> float:
        """Seconds of the longest step after `step`."""
        index = bisect_right(self._ends, step)
        return self._steps[index] if index < len(self._steps) else 0.0
