"""Which instances the requests of this gateway occupy, from the moment in which they are placed.

Engines report their load once a second: requests that come within that second must not all see the same one idle.
"""

from __future__ import annotations

from collections import Counter


class Places:
    """Those of one request; an instance that it uses in two roles counts twice."""

    def __init__(self, occupied: Counter[str], instances: list[str]) -> None:
        self._occupied, self._mine = occupied, instances
        occupied.update(instances)

    def leave(self, instance: str) -> None:
        """The request has done with one role of `instance`. A further time means nothing."""
        if instance in self._mine:
            self._mine.remove(instance)
            self._occupied[instance] -= 1

    def leave_all(self) -> None:
        """The request has ended."""
        for instance in list(self._mine):
            self.leave(instance)
