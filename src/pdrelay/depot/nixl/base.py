"""The seam to NIXL: an agent writes runs of parts straight into a far arena, and says so with a note.

NIXL has no call after which a peer can write no more: neither forgetting the peer's metadata nor deregistering memory
stops what its connections bring (UCX over TCP goes on for good, a cancelled request is carried out all the same). What
does is the end of the process that holds those connections. So an agent is a process of its own, lives as long as one
conversation of a link, and is killed with it. `nixl/memory.py` has the in-memory twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pdrelay.depot.link_messages import Endpoint


class Piece(NamedTuple):
    """Neighbouring bytes to copy. Offsets are into the arena here and the one there."""

    here: int
    there: int
    size: int


class AgentListener(Protocol):
    """What an agent tells, on the depot's event loop. Nothing comes once it was closed."""

    def written(self, batch: int) -> None:
        """Batch `batch` is in the far arena and its note is on the way; its bytes here are read no more."""
        ...

    def notified(self, note: bytes) -> None:
        """A peer sent a note. What it wrote before it is in our arena. The bytes of the note are the peer's."""
        ...

    def broken(self, detail: str) -> None:
        """The agent works no more; comes once. What was under way may have arrived or not."""
        ...


class Agent(Protocol):
    """One end of the path of one conversation: it writes to one peer, or is written to by one."""

    @property
    def path(self) -> str:
        """What the payload takes, such as `nixl UCX rc_mlx5/mlx5_0:1`."""
        ...

    async def start(self) -> Endpoint:
        """Registers the arena; where a peer may write. Raises DepotError."""
        ...

    async def connect(self, far: Endpoint) -> None:
        """Connects to the peer by a first small write. Raises DepotError."""
        ...

    def write(self, batch: int, pieces: Sequence[Piece], note: bytes) -> None:
        """Copies `pieces` into the far arena, then sends `note`. Does not wait. Batches may overtake each other."""
        ...

    def notify(self, note: bytes) -> None:
        """Sends a note; it arrives after the bytes of every batch that is `written`. Does not wait."""
        ...

    def close(self) -> None:
        """Ends the agent without waiting."""
        ...

    async def aclose(self) -> None:
        """Ends the agent. When it returns, nobody reads or writes our arena through it any more, whatever the peer
        does: `INV-NIXL-1`."""
        ...


MakeAgent = Callable[[AgentListener], Agent]
