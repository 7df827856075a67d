"""The deployment around a simulated request."""

from __future__ import annotations

from typing import Protocol, TypeVar

from pdrelay.policy.base import Placement
from pdrelay.sim.events import Events
from pdrelay.sim.line import Line
from pdrelay.sim.parts import Instance
from pdrelay.sim.relaying import Handoffs
from pdrelay.workload.base import Request

L = TypeVar("L", contravariant=True)
"""The request's life."""


class World(Protocol[L]):
    """The deployment around a request."""

    events: Events
    handoffs: Handoffs
    overlap: bool
    slices: float
    token_zero: bool

    def place(self, request: Request) -> tuple[Placement, dict[str, int]]:
        """Asks the policy; also the prompt tokens that each instance holds. Raises PlacementError."""
        ...

    def instance(self, name: str) -> Instance:
        """The instance called `name`."""
        ...

    def spare_relay(self, cluster: str) -> Instance | None:
        """A relay that can go on with a request of `cluster`."""
        ...

    def line(self, source: str, target: str) -> Line | None:
        """The line between two clusters; None where KV moves in no time."""
        ...

    def ended(self, life: L) -> None:
        """The request has ended, one way or the other."""
        ...
