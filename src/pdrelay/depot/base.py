"""The seams of the depot: what engines, the gateway and other depots may ask of it.

A depot owns a shared-memory arena of KV pages, their index, the leases on them and the links to other depots. All
traffic is "make these names exist there". The in-memory twins in `depot/memory.py` keep the same contracts.

Life of a page: *absent* -> *reserved* (one writer: an engine or an incoming transfer) -> *complete* (all parts
are there) -> evicted, least recently used first, once nothing pins it. A writer that goes away before the page is
complete makes it absent again.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

Fidelity = Literal["", "fp8", "int8"]
"""The lossy wire codec that a copy of a page came through; empty for an exact copy."""


class PageKind(enum.Enum):
    """Prefix pages are whole and reusable; transfer pages are a prompt's tail, dropped when nothing pins them."""

    PREFIX = "prefix"
    TRANSFER = "transfer"


class Part(NamedTuple):
    """One finished part of a page: its bytes are in the arena at `offset + part * part_bytes`."""

    name: bytes
    part: int  # layer * shards + shard
    checksum: int  # xxh3_64 of the part's bytes


class Leased(NamedTuple):
    """A complete page that stays where it is until its lease ends."""

    offset: int  # of its bytes in the arena
    checksums: bytes  # of its parts, packed as in `depot/checksums.py`
    from_disk: bool = False  # it was brought back from the disk tier, and this is its first lease since


class Leases(NamedTuple):
    """What `lease` gives."""

    pages: list[Leased]  # the leading names that are complete in the arena
    coming: int = 0  # how many names after those are on their way from the disk tier: ask again


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine had the KV of prompts from, in tokens. The first four are the tokens of all these prompts."""

    own: int = 0  # found in the engine's own cache
    arena: int = 0  # loaded from the depot's arena
    disk: int = 0  # loaded from there, where the disk tier had brought it back for this
    computed: int = 0
    reloaded: int = 0  # loaded once more, after the engine had preempted a request
    requests: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(**{field: getattr(self, field) + getattr(other, field) for field in self.__struct_fields__})

    @property
    def tokens(self) -> int:
        """Tokens of the prompts."""
        return self.own + self.arena + self.disk + self.computed


class EngineDepot(Protocol):
    """What an engine's connector asks of the depot of its host. Blocking, thread-safe, a local round trip each.

    `owner` names who holds leases and reservations, one a request; all that an owner holds ends with `release`. An
    engine's scheduler and workers are processes with a connection each: connections of one instance share its owners
    (the scheduler reserves, a worker publishes and releases), and an owner ends when the connection that first named
    it closes. Every call raises DepotUnavailableError when the depot is gone.
    """

    @property
    def arena(self) -> memoryview:
        """The writable shared arena."""
        ...

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        ...

    @property
    def epoch(self) -> str:
        """Of the depot's process: offsets of one epoch mean nothing in another."""
        ...

    def match(self, names: Sequence[bytes]) -> int:
        """How many leading `names` are complete here. Those on disk count, and are brought back into the arena."""
        ...

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """Which of `names` are complete here, on disk included."""
        ...

    def lease(self, owner: str, names: Sequence[bytes]) -> Leases:
        """Keeps the leading complete pages of `names` for reading, and brings back what follows them on disk.

        A reader verifies every part that it loads.
        """
        ...

    def corrupt(self, owner: str, names: Sequence[bytes]) -> None:
        """Says that the bytes of these pages, which `owner` leases, do not fit their checksums: nobody gets them any
        more. Who still reads them keeps their room until then; transfers fetch them again."""
        ...

    def reserve(self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind]) -> list[int | None]:
        """Makes `owner` the writer of each absent page; its byte offset, None for pages that are reserved or complete.

        All or nothing: raises ArenaFullError, and reserves none, when they do not all fit.
        """
        ...

    def publish(self, owner: str, parts: Sequence[Part]) -> None:
        """Says that these parts are written. Does not wait for an answer; parts stream on from here at once."""
        ...

    def release(self, owner: str) -> None:
        """Ends the leases of `owner` and drops its reserved pages that are not complete."""
        ...

    def report_held(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tells which prefix pages entered and left this engine's own KV cache: pages that it can use wherever the
        other pages that a prefix needs come from. Does not wait for an answer."""
        ...

    def report_use(self, use: Use) -> None:
        """Tells where the KV of a request's prompt came from. Does not wait for an answer."""
        ...

    def close(self) -> None:
        """Ends the connection and all its owners."""
        ...


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A wish: these names shall exist at depot `to`, pages that are still to be produced included.

    While the transfer lives its names are pinned at both ends as they become complete.
    """

    xfer: str
    names: list[bytes]  # in token order, pages of all KV groups
    tails: int = 0  # how many of the last names are transfer pages
    to: str | None = None  # depot; None only pins the names here
    addressee: str = ""  # engine that will load them; what its own cache holds is not sent
    background: bool = False  # nobody waits for it: it yields to every transfer that is not
    produced: bool = False  # who was to produce pages has ended: one that is absent by now stays so


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The far depot answered the offer: it (or the addressee's cache) holds `have` of the names."""

    xfer: str
    have: int


class Delivered(msgspec.Struct, frozen=True, tag="delivered"):
    """All names are complete at the far depot."""

    xfer: str


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """Wanted pages lost their writer and nobody produces them now; another prefill would."""

    xfer: str
    names: list[bytes]


class LinkState(msgspec.Struct, frozen=True, tag="link"):
    """The link to depot `to` came up or went down."""

    to: str
    up: bool
    detail: str = ""
    path: str = ""  # what payload takes while it is up, such as `tcp` or `nixl UCX rc_mlx5/mlx5_0:1`


class LinkEstimate(msgspec.Struct, frozen=True, kw_only=True, tag="estimate"):
    """What the link to depot `to` can carry, about once a second while that changes."""

    to: str
    rate: float  # bytes per second, delivered while something waited; the configured one before it was measured
    measured: bool  # whether `rate` is
    ratio: float = 1.0  # bytes of KV for each of these: more than 1 with a codec
    rtt: float  # seconds, of a message of a few bytes there and back, smoothed
    base_rtt: float  # seconds, without queueing
    tcp_rtt: float = 0.0  # seconds, the kernel's smoothed one over the bulk connections; 0 where it knows none
    loss: float = 0.0  # share of the bytes sent of late that had to be sent again, 0 to 1
    retransmitted_bytes: int = 0  # since the link's start
    queued: int = 0  # bytes of live transfers that the far side wants and has not got
    queued_background: int = 0  # ... and of those that nobody waits for
    lanes: int = 0  # connections
    busy: float = 0.0  # share of them that had something under way of late, 0 to 1
    far_room: int = 0  # bytes that new pages may take in the far arena
    far_waiting: int = 0  # transfers that wait for room there
    far_corrupt: int = 0  # parts that arrived corrupt there, since its start


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Pages became available at `holder`: a depot's arena or an engine's own cache."""

    holder: str
    names: list[bytes]


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """Pages left `holder`."""

    holder: str
    names: list[bytes]


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """All that was known of `holder` is void (it restarted or went away)."""

    holder: str


DepotEvent = Offered | Delivered | Stalled | LinkState | LinkEstimate | Stored | Removed | Forgotten


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer cost so far, in payload bytes."""

    sent: int = 0
    wire: int = 0  # bytes that `sent` took on the line: fewer when the link has a codec
    saved: int = 0  # bytes of names that the far side held already
    pages: int = 0
    delivered: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a transfer is that lives."""

    xfer: str
    to: str | None  # see Transfer
    age: float  # seconds since it started
    done: int  # bytes that the far side has
    total: int  # ... of all names; 0 while the depot does not know their size
    absent: int  # names that are still to be produced here
    background: bool  # nobody waits for it
    delivered: bool
    seconds: float | None  # until what is not there is, as the line and its queue are; None: no line, or it is down


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier."""

    state: str = "none"  # or "on", or "off: " and why
    pages: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    written_pages: int = 0
    restored_pages: int = 0  # read back into the arena
    evicted_pages: int = 0
    corrupt_pages: int = 0  # read back with bytes that do not fit: dropped
    errors: int = 0


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """A link to another depot."""

    state: LinkState
    estimate: LinkEstimate | None  # None: it was never up


class DepotStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters that must return to their start when all requests have ended: leases, reservations, transfers."""

    pages: int
    reserved: int  # pages with a writer
    pinned: int  # pages with a lease
    leases: int  # owners that hold something
    transfers: int
    used_bytes: int
    capacity_bytes: int
    sent_bytes: int
    sent_wire_bytes: int  # bytes that those took on the line: fewer on links with a codec
    received_bytes: int
    received_wire_bytes: int  # all that came on bulk connections, parts that nobody needed included
    lossy_pages: int  # pages whose copy came through a lossy codec
    corrupt_parts: int  # received from other depots
    corrupt_pages: int  # dropped because their bytes in the arena were wrong
    evicted_pages: int
    reserve_waits: int  # reservations refused for want of room
    disk: DiskStats
    use: dict[str, Use]  # by engine instance, since the depot started
    links: dict[str, LinkStats]  # by the depot that each leads to


class DepotControl(Protocol):
    """What the gateway, and the engine's endpoint plug-in, ask of a depot. Asynchronous.

    Every call raises DepotUnavailableError when the depot is gone; the client reconnects by itself.
    """

    @property
    def fleet_key(self) -> bytes:
        """Key of the page names."""
        ...

    @property
    def trouble(self) -> str:
        """Why calls fail now; empty while they work."""
        ...

    async def wait(self, names: Sequence[bytes], engine: str = "") -> None:
        """Returns once each name is complete in the arena or in `engine`'s own cache. Cancel to stop waiting."""
        ...

    async def transfer(self, transfer: Transfer) -> None:
        """Starts a transfer; what becomes of it comes as events. One that lives is told anew what changed of it."""
        ...

    async def demote(self, xfer: str) -> None:
        """Lets the transfer finish at low priority, without its tail, and end by itself when all is delivered."""
        ...

    async def end(self, xfer: str) -> TransferStats:
        """Ends the transfer at both ends and unpins its names. Unknown ids are not an error."""
        ...

    async def transfer_stats(self, xfer: str) -> TransferStats:
        """What the transfer cost so far."""
        ...

    async def progress(self) -> list[Progress]:
        """How far each live transfer is, the oldest first."""
        ...

    async def stats(self) -> DepotStats:
        """The depot's counters."""
        ...

    def events(self) -> AsyncIterator[DepotEvent]:
        """All events from now on, opened by the present holdings as `Stored`. When the connection is lost, `Forgotten`
        comes for the depot and every other holder that it told of; after a reconnect the holdings come anew."""
        ...

    async def aclose(self) -> None:
        """Ends the connection; transfers that it started end too, but for demoted ones."""
        ...
