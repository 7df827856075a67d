"""The seam between transfers and the link that carries them: another depot as the sending side sees it."""

from __future__ import annotations

from typing import Protocol

from pdrelay.depot import link_messages as link
from pdrelay.depot.schedule import Schedule


class Peer(Protocol):
    """A depot that we can send to."""

    @property
    def up(self) -> bool:
        """Whether it is connected."""
        ...

    @property
    def rate(self) -> float:
        """Bytes of KV per second that the line carries, measured as soon as can be."""
        ...

    @property
    def rtt(self) -> float:
        """Seconds there and back."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Whose turn it is."""
        ...

    def send(self, message: link.LinkMessage) -> None:
        """Sends a control message, in order; does nothing while the link is down."""
        ...

    def wake(self) -> None:
        """There is something to send in bulk."""
        ...

    def prepare(self) -> None:
        """There will be something to send in bulk soon."""
        ...
