"""Grants: where peers that write straight into the arena may do so.

A grant covers one page and one production of it at the sender, and holds the page's extent: whatever becomes of the
page, the extent is not used for anything else before the sender said that it writes there no more, or cannot any more
because the agent that its writes came through is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from pdrelay.depot.index import Index
from pdrelay.depot.page import Page

REVOKE_SECONDS = 30.0
"""A sender that has not closed a revoked grant for so long hangs: its conversation is ended, which frees the extent."""


class Place(NamedTuple):
    """Where a page lies for a peer that writes itself."""

    grant: int
    offset: int


NOWHERE = Place(0, 0)
"""For a peer that does not write itself."""


@dataclass(slots=True)
class _Grant:
    page: Page
    revoked: bool = False
    since: float | None = None  # the first tick after that


class Grants:
    """All grants of one depot."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._numbers = count(1)
        self._of_peer: dict[str, dict[int, _Grant]] = {}
        self._break_off: dict[str, Callable[[str], None]] = {}

    def __len__(self) -> int:
        return sum(len(grants) for grants in self._of_peer.values())

    def open(self, peer: str, break_off: Callable[[str], None]) -> None:
        """From now on `peer` writes itself. `break_off` ends its conversation for the reason given."""
        assert peer not in self._of_peer, "INV-NIXL-2: a peer has grants of one agent at a time"
        self._of_peer[peer], self._break_off[peer] = {}, break_off

    def give(self, peer: str, page: Page) -> Place:
        """Leave to write to `page`, which is held as long."""
        grants = self._of_peer.get(peer)
        if grants is None:
            return NOWHERE
        number = next(self._numbers)
        self._index.hold(page)
        grants[number] = _Grant(page)
        return Place(number, page.offset)

    def revoke(self, peer: str, number: int) -> bool:
        """Nothing more is wanted there; whether the peer must be told."""
        grant = self._of_peer.get(peer, {}).get(number)
        if grant is None or grant.revoked:
            return False
        grant.revoked = True
        return True

    def closed(self, peer: str, number: int) -> Page | None:
        """The peer writes there no more; the page if that was not asked of it."""
        grant = self._of_peer.get(peer, {}).pop(number, None)
        if grant is None:
            return None
        self._index.unhold(grant.page)
        return None if grant.revoked else grant.page

    def lost(self, peer: str) -> None:
        """The agent that the peer wrote through is gone."""
        for grant in self._of_peer.pop(peer, {}).values():
            self._index.unhold(grant.page)
        self._break_off.pop(peer, None)

    def tick(self, now: float) -> None:
        """Breaks with peers that do not answer. Call a few times a second."""
        for peer, grants in list(self._of_peer.items()):
            revoked = [grant for grant in grants.values() if grant.revoked]
            for grant in revoked:
                grant.since = now if grant.since is None else grant.since
            if any(grant.since is not None and now - grant.since >= REVOKE_SECONDS for grant in revoked):
                self._break_off[peer](f"depot {peer} has not given a page's room back for {REVOKE_SECONDS:g} s")
