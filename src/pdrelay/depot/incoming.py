"""A transfer that comes in, and the pages that it fetches."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrelay.depot import link_messages as link
from pdrelay.depot.grants import NOWHERE, Place
from pdrelay.depot.inbox import Slot
from pdrelay.depot.page import Page


@dataclass(slots=True)
class Fetch:
    """A page that is being received."""

    receiving: Receiving
    page: Page
    slot: Slot
    place: Place = NOWHERE
    epoch: int = 0  # the sender's
    failures: int = 0  # runs with corrupt parts

    @property
    def is_untouched(self) -> bool:
        """Nothing of the page has come, and it is still wanted."""
        return not self.page.have and not self.page.dropped


@dataclass(slots=True, eq=False)
class Receiving:
    """One transfer."""

    peer: str
    offer: link.Offer
    names: list[bytes]
    background: bool
    lacking: dict[bytes, None] = field(default_factory=dict)  # neither here nor held by the addressee
    asked: bool = False  # each name that is lacking has a writer, or comes: nothing to reserve until one is lost
    arrived: bool = False
    tails: frozenset[bytes] = frozenset()  # names of transfer pages
    whole: bool = False  # all its pages are at the sender, or being written there
    yielded: bool = False  # its complete pages are not pinned: an older one needs their room

    @property
    def key(self) -> tuple[str, str]:
        """Its identity."""
        return self.peer, self.offer.xfer

    @property
    def owner(self) -> str:
        """Its name in the index."""
        return f"in:{self.peer}:{self.offer.xfer}"
