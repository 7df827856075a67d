"""What the requests of this gateway occupy, from the moment in which they are placed.

Engines report their load once a second: requests that come within that second must not all see the same one idle.
"""

from __future__ import annotations

from collections import Counter


class Occupancy:
    """All requests of a gateway, by instance."""

    def __init__(self) -> None:
        self.requests = Counter[str]()
        self.backlog = Counter[str]()  # prompt tokens that are still to be computed


class Places:
    """Those of one request; an instance that it uses in two roles counts twice."""

    def __init__(self, occupancy: Occupancy, instances: list[str], prefill: str, uncached: int) -> None:
        """`prefill` is to compute `uncached` tokens."""
        self._occupancy, self._mine = occupancy, instances
        self._prefill, self._uncached = prefill, uncached
        occupancy.requests.update(instances)
        occupancy.backlog[prefill] += uncached

    def prefill_ended(self) -> None:
        """Nothing more is computed of the prompt there. A further time means nothing."""
        self._occupancy.backlog[self._prefill] -= self._uncached
        self._uncached = 0

    def leave(self, instance: str) -> None:
        """The request has done with one role of `instance`. A further time means nothing."""
        if instance in self._mine:
            self._mine.remove(instance)
            self._occupancy.requests[instance] -= 1

    def leave_all(self) -> None:
        """The request has ended."""
        self.prefill_ended()
        for instance in list(self._mine):
            self.leave(instance)
