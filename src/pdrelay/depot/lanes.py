"""The seam between a link's conversation and what carries its payload: TCP connections, or a faster path.

A `DepotLink` negotiates, offers and hears answers on its control connection; `Lanes` carry the batches. Both live on
the depot's event loop: lanes that use threads post to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from pdrelay.depot.link_messages import Endpoint, LinkMessage, Transport
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.depot.tcp_info import TcpInfo

FarEndpoint = Callable[[], Awaitable[Endpoint]]


class LaneOwner(Protocol):
    """What lanes tell the link. Called on the event loop."""

    def send(self, message: LinkMessage) -> None:
        """Sends a control message; does nothing while the link is down."""
        ...

    def lanes_ready(self) -> None:
        """There may be room for another batch. Comes after whatever else lanes tell."""
        ...

    def batch_written(self, batch: FlyingBatch) -> None:
        """Nobody reads the batch's bytes in the arena any more. Once for each batch that was put."""
        ...

    def batch_failed(self, batch: FlyingBatch) -> None:
        """The batch was not acknowledged and never will be: send it again. Comes after `batch_written`."""
        ...

    def lanes_broken(self, detail: str) -> None:
        """Nothing gets through any more: the conversation must end."""
        ...


class LaneUse(NamedTuple):
    """The lanes at one moment."""

    lanes: int  # connected ones
    busy: int  # ... with a batch under way
    connections: tuple[TcpInfo, ...] = ()  # what the kernel knows of them, where TCP carries the payload


class Lanes(Protocol):
    """Carries batches from this depot's arena into a peer's, in any order among each other. Never blocks.

    A batch that was put is read from the arena until `batch_written`, and under way until it is `acked` or
    `batch_failed`. The peer acknowledges on the control connection.
    """

    @property
    def transport(self) -> Transport:
        """What both sides must have configured."""
        ...

    @property
    def path(self) -> str:
        """What the payload takes, for logs and metrics, such as `tcp`."""
        ...

    async def prepare(self, far: FarEndpoint) -> None:
        """Makes ready what must be there before the link is up. `far` waits for the peer to tell where to write.

        Raises DepotError, and what `far` raises.
        """
        ...

    def open(self) -> None:
        """The conversation is up: connects in the background, then calls `lanes_ready`."""
        ...

    def close(self) -> None:
        """The conversation is gone: breaks everything. Each batch under way fails as soon as nobody reads it."""
        ...

    def room(self, xfer: str, urgency: int) -> bool:
        """Whether a batch of this transfer and urgency (see FlyingBatch) may be put now."""
        ...

    def put(self, batch: FlyingBatch) -> None:
        """Sends a batch, ahead of less urgent ones that have not begun. Only when there is `room`."""
        ...

    def acked(self, number: int) -> FlyingBatch | None:
        """The peer has read batch `number`: forgets and returns it; None for one that is not under way."""
        ...

    def revoke(self, grants: Sequence[int]) -> None:
        """Nothing will be put under these grants any more: tells the peer once nothing of them is under way."""
        ...

    def on_secrets(self, secrets: Sequence[bytes]) -> None:
        """The peer gave what opens connections."""
        ...

    def use(self) -> LaneUse:
        """The lanes at this moment."""
        ...

    def warm(self, round_trip_bytes: float, padding: Callable[[int], FlyingBatch]) -> list[FlyingBatch]:
        """Opens the congestion windows of connections that are cold, with no more than `round_trip_bytes` together.

        The batches of padding that were put for it.
        """
        ...

    def adapt(self, rate: float) -> None:
        """The line carries `rate` bytes per second: no more than it needs shall wait in buffers before it."""
        ...

    async def aclose(self) -> None:
        """Waits, after `close`, until nothing touches the arena any more."""
        ...
