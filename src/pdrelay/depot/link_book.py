"""What a depot knows of its links to others: whether each is up, by what path, and what it can carry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from pdrelay.depot.base import DepotEvent, LinkEstimate, LinkState, LinkStats

logger = logging.getLogger(__name__)


class LinkBook:
    """The last state and estimate of every link that was tried, by the depot it leads to."""

    def __init__(self, emit: Callable[[DepotEvent], None]) -> None:
        """`emit` tells the depot's subscribers what is new."""
        self._emit = emit
        self.states: dict[str, LinkState] = {}
        self.estimates: dict[str, LinkEstimate] = {}

    def state(self, state: LinkState) -> None:
        """A link came up or went down."""
        if self.states.get(state.to) != state:
            self.states[state.to] = state
            logger.info("link to depot %s %s", state.to, "is up" if state.up else f"is down: {state.detail}")
            self._emit(state)

    def estimate(self, estimate: LinkEstimate) -> None:
        """What a link can carry changed."""
        self.estimates[estimate.to] = estimate
        self._emit(estimate)

    def events(self) -> Iterator[DepotEvent]:
        """What a new subscriber must be told."""
        yield from self.states.values()
        yield from self.estimates.values()

    def up(self) -> dict[str, bool]:
        """Whether each link is up."""
        return {to: state.up for to, state in self.states.items()}

    def paths(self) -> dict[str, str]:
        """What payload takes on each link that is up."""
        return {to: state.path for to, state in self.states.items() if state.up}

    def stats(self) -> dict[str, LinkStats]:
        """All of it."""
        return {to: LinkStats(state=state, estimate=self.estimates.get(to)) for to, state in self.states.items()}
