"""What two depots say to each other.

The sending depot opens the connections: one for control, several for bulk. Control frames are those of `wire`; a bulk
connection carries, after its `BulkHello`, batches: a `Batch` frame and then the bytes of its runs, one after the other.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdrelay.cluster.topology import Encryption
from pdrelay.depot import wire
from pdrelay.depot.base import Fidelity
from pdrelay.errors import ProtocolError
from pdrelay.kv.contract import KVContract
from pdrelay.versions import Versions, agree

VERSIONS = Versions(2, 2)
"""Of the link protocol."""

Transport = Literal["tcp", "nixl"]
"""What carries payload: bulk connections, or writes of a NIXL agent straight into the receiver's arena."""


class LinkHello(msgspec.Struct, frozen=True, kw_only=True, tag="link", array_like=True):
    """First frame on the control connection, from both sides."""

    versions: Versions = VERSIONS
    depot: str
    key_check: bytes  # proves the fleet key without telling it
    contracts: list[KVContract]  # of the engines on this host
    codec: str = "none"  # wire codec of the link; both sides must be configured with the same
    transport: Transport = "tcp"  # that this side's configuration has for the link
    encryption: Encryption = "tls"  # the same


class Endpoint(msgspec.Struct, frozen=True, tag="endpoint", array_like=True):
    """Where the sender may write by NIXL, once the receiver's agent is ready. Addresses are of the agent's process."""

    metadata: bytes  # NIXL's own
    base: int  # of the arena
    warm: int  # of some bytes that a first write may go to


class Contracts(msgspec.Struct, frozen=True, tag="contracts", array_like=True):
    """The engines on this host, and so their contracts, changed."""

    contracts: list[KVContract]


class Live(msgspec.Struct, frozen=True, tag="live", array_like=True):
    """After a reconnect: the transfers that still live; all others from this depot have ended."""

    xfers: list[str]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer", array_like=True):
    """The sender has `names`, or will have them. A known transfer may be offered again: the answer starts anew."""

    xfer: str
    names: list[bytes]
    tails: int  # how many of the last names are transfer pages
    addressee: str
    background: bool
    contract: KVContract | None


class Demoted(msgspec.Struct, frozen=True, tag="demoted", array_like=True):
    """The transfer goes on at low priority with its first `names` names only."""

    xfer: str
    names: int


class Ended(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """The transfer is over: unpin."""

    xfer: str


class Whole(msgspec.Struct, frozen=True, tag="whole", array_like=True):
    """Whether all pages of the transfer are at the sender or being written there; not, until it says so."""

    xfer: str
    whole: bool


class Answered(msgspec.Struct, frozen=True, tag="answered", array_like=True):
    """The receiver, or the addressee's cache, has the names in bitmap `held`."""

    xfer: str
    held: bytes  # little-endian bitmap over the offer's names


class Want(msgspec.Struct, frozen=True, tag="want", array_like=True):
    """The receiver has room for this page and lacks the parts in bitmap `parts` of production `epoch` (0: any).

    By NIXL the sender may write these parts of one production, the first that it sends, at `offset` in the far arena.
    """

    name: bytes
    epoch: int
    parts: bytes  # little-endian bitmap; empty means all parts
    grant: int = 0  # number of that leave; 0 without NIXL
    offset: int = 0


class Wants(msgspec.Struct, frozen=True, tag="wants", array_like=True):
    """What shall be sent for a transfer."""

    xfer: str
    wants: list[Want]


class Suspect(msgspec.Struct, frozen=True, tag="suspect", array_like=True):
    """Parts of production `epoch` of this page keep arriving corrupt: the sender shall look at its own copy."""

    xfer: str
    name: bytes
    epoch: int


class Revoke(msgspec.Struct, frozen=True, tag="revoke", array_like=True):
    """The sender shall write under these grants no more, and say `Closed` once nothing of them is under way."""

    grants: list[tuple[bytes, int]]  # name of the page, number of the grant


class Ack(msgspec.Struct, frozen=True, tag="ack", array_like=True):
    """These batches have been read."""

    batches: list[int]


class Arrived(msgspec.Struct, frozen=True, tag="arrived", array_like=True):
    """All names of the transfer are complete at the receiver."""

    xfer: str


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """Asks for a sign of life; comes back as it is."""


class AskSecrets(msgspec.Struct, frozen=True, tag="secrets?", array_like=True):
    """The sender wants to open `count` bulk connections in clear."""

    count: int


class Secrets(msgspec.Struct, frozen=True, tag="secrets", array_like=True):
    """Each opens one bulk connection, once."""

    secrets: list[bytes]


class Stats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """How the receiver is, about once a second while that changes."""

    room: int  # bytes that new pages may take in its arena
    waiting: int  # transfers of this sender that wait for room
    corrupt: int  # parts that arrived corrupt, of all senders, since its start


LinkMessage = (
    LinkHello
    | Endpoint
    | Contracts
    | Live
    | Offer
    | Demoted
    | Ended
    | Whole
    | Answered
    | Wants
    | Suspect
    | Revoke
    | Ack
    | Arrived
    | AskSecrets
    | Secrets
    | Stats
    | Ping
    | wire.Failure
)


class BulkHello(msgspec.Struct, frozen=True, kw_only=True, tag="bulk", array_like=True):
    """First and only frame of its kind on a bulk connection."""

    versions: Versions = VERSIONS
    depot: str
    secret: bytes = b""  # on a connection in clear


class Encoding(msgspec.Struct, frozen=True, array_like=True):
    """Parts of a run travel encoded."""

    codec: str
    size: int  # bytes on the wire
    checksum: int  # xxh3_64 of those bytes


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Parts `first`, `first + 1`, ... of one page; their bytes follow the batch's header."""

    name: bytes
    epoch: int
    first: int
    part_bytes: int
    checksums: bytes  # of the sender's parts; uint64, little-endian, one a part
    fidelity: Fidelity = ""  # of the sender's copy
    encoding: Encoding | None = None
    grant: int = 0  # that it was written under by NIXL

    @property
    def parts(self) -> int:
        """How many parts."""
        return len(self.checksums) // 8

    @property
    def payload(self) -> int:
        """Bytes of all parts."""
        return self.parts * self.part_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that follow the header for this run."""
        return self.payload if self.encoding is None else self.encoding.size

    @property
    def bits(self) -> int:
        """Bitmap of the parts."""
        return ((1 << self.parts) - 1) << self.first


class Batch(msgspec.Struct, frozen=True, tag="batch", array_like=True):
    """A header; the payload of its runs follows outside the frame. By NIXL it is a note, and the payload is there."""

    batch: int
    runs: list[Run]
    padding: int = 0  # bytes after the runs, for nobody


class Closed(msgspec.Struct, frozen=True, tag="closed", array_like=True):
    """A note by NIXL: nothing is written under these grants any more."""

    grants: list[int]


Note = Batch | Closed


ClientHello = wire.Hello | LinkHello

_hello = msgspec.msgpack.Decoder(LinkHello)
_failure = msgspec.msgpack.Decoder(wire.Failure)
_messages = msgspec.msgpack.Decoder(LinkMessage)
_bulk_hello = msgspec.msgpack.Decoder(BulkHello)
_batch = msgspec.msgpack.Decoder(Batch)
_note = msgspec.msgpack.Decoder(Note)


def decode_first(body: bytes | memoryview) -> ClientHello:
    """The first frame on a control connection: a gateway's or a depot's. Raises ProtocolError."""
    if wire.stated_tag(body) == "link":
        return decode_hello(body)
    return wire.decode_hello(body)


def decode_hello(body: bytes | memoryview) -> LinkHello:
    """A depot's first frame on a control connection. Raises ProtocolError, also what a `failure` instead of it says."""
    if wire.stated_tag(body) == "failure":
        raise wire.rebuild(wire.decoded(_failure, body))
    agree("link protocol", VERSIONS, wire.stated_versions(body), "the other depot")
    return wire.decoded(_hello, body)


def decode(body: bytes | memoryview) -> LinkMessage:
    """A message of the control connection. Raises ProtocolError."""
    return wire.decoded(_messages, body)


def decode_bulk_hello(body: bytes | memoryview) -> BulkHello:
    """A bulk connection's first frame. Raises ProtocolError."""
    agree("link protocol", VERSIONS, wire.stated_versions(body), "the other depot")
    return wire.decoded(_bulk_hello, body)


def decode_batch(body: bytes | memoryview) -> Batch:
    """A batch's header. Raises ProtocolError."""
    return _checked(wire.decoded(_batch, body))


def decode_note(note: bytes) -> Note:
    """A note that came by NIXL. Raises ProtocolError."""
    decoded = wire.decoded(_note, note)
    return _checked(decoded) if isinstance(decoded, Batch) else decoded


def _checked(batch: Batch) -> Batch:
    if not 0 <= batch.padding <= wire.MAX_FRAME:
        raise ProtocolError(f"a padding of {batch.padding} bytes")
    for run in batch.runs:
        if len(run.checksums) % 8 or run.part_bytes <= 0 or run.first < 0 or run.payload > wire.MAX_FRAME:
            raise ProtocolError(f"a run of {run.parts} parts of {run.part_bytes} bytes from part {run.first}")
        if run.encoding is not None and not 0 < run.encoding.size < run.payload:
            raise ProtocolError(f"{run.payload} bytes encoded in {run.encoding.size}")
    return batch


def pack_bits(bits: int) -> bytes:
    """A bitmap as it travels."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(data: bytes) -> int:
    """The inverse of `pack_bits`."""
    return int.from_bytes(data, "little")
