"""How the payload of a run is laid out on the wire: as it is in the arena, or as the link's codec encodes it.

Both directions run in the threads of bulk connections. A thread encodes one batch at a time and decodes one run at a
time, so that each connection holds no more than that in addition to the arena.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import msgspec

from pdrelay.cluster.topology import CodecName
from pdrelay.depot import link_messages as link
from pdrelay.depot.base import Fidelity
from pdrelay.depot.checksums import checksum, unpack_checksums, wrong_parts
from pdrelay.depot.codec.base import Encoded, WireCodec
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.errors import ContractError, ProtocolError
from pdrelay.kv.contract import KVContract
from pdrelay.kv.shape import PartShape

ReadInto = Callable[[memoryview], None]
"""Fills the whole view from a connection. Raises OSError when it breaks."""

_SCRATCH = 1 << 18


class Traffic(NamedTuple):
    """What went through one direction of a link."""

    payload_bytes: int = 0
    wire_bytes: int = 0
    codec_seconds: float = 0.0  # in the codec, over all threads


class Coder:
    """One direction of a link. Shared by the threads of its connections."""

    def __init__(self, codec: WireCodec | None = None) -> None:
        self.codec = codec
        self.traffic = Traffic()
        self._lock = threading.Lock()

    @property
    def name(self) -> CodecName:
        """The codec's name; `none` without one."""
        return self.codec.name if self.codec is not None else "none"

    def require_fit(self, contracts: list[KVContract]) -> None:
        """Raises ContractError when the codec cannot carry what engines of these contracts keep."""
        if self.codec is None or self.codec.lossless:
            return
        for contract in contracts:
            for number, (group, layout) in enumerate(zip(contract.groups, contract.layouts, strict=True)):
                if not layout.shape.heads:
                    ours = f"{self.name}, which scales each head of full or windowed attention in a known layout"
                    theirs = f"groups[{number}] of {contract.model}: {group.kind} of {group.dtype} in {group.codec}"
                    raise ContractError("link.codec", ours, theirs)

    def count(self, run: link.Run, seconds: float = 0.0) -> None:
        """Notes that a run went through."""
        with self._lock:
            payload, wire, before = self.traffic
            self.traffic = Traffic(payload + run.payload, wire + run.wire_bytes, before + seconds)


class RunEncoder(Coder):
    """The sending side."""

    @property
    def ratio(self) -> float:
        """Payload bytes for each byte on the line, so far."""
        payload, wire, _ = self.traffic
        return payload / wire if wire else 1.0

    def encode(self, run: link.Run, parts: memoryview, shape: PartShape) -> tuple[link.Run, Encoded]:
        """The header and the bytes that go on the wire for `run`, whose `parts` are in the sender's arena."""
        assert len(parts) == run.payload
        begun = perf_counter()
        encoded = self._encoded(run, parts, shape)
        seconds = perf_counter() - begun
        if encoded is not None:
            encoding = link.Encoding(self.name, len(encoded), checksum(encoded))
            run = msgspec.structs.replace(run, encoding=encoding)
        self.count(run, seconds)
        return run, parts if encoded is None else encoded

    def _encoded(self, run: link.Run, parts: memoryview, shape: PartShape) -> Encoded | None:
        if self.codec is None:
            return None
        # INV-CODEC-1: what is not exact any more is not encoded again with loss. INV-CODEC-2: nor is what is corrupt
        # here already, because nobody could tell afterwards.
        if not self.codec.lossless and (run.fidelity or wrong_parts(parts, unpack_checksums(run.checksums))):
            return None
        return self.codec.encode(parts, run.part_bytes, shape)


def encoded(batch: FlyingBatch, arena: memoryview, encoder: RunEncoder) -> tuple[link.Batch, list[Encoded]]:
    """The header of `batch` as it goes on the wire, and what follows it, run by run."""
    runs: list[link.Run] = []
    payloads: list[Encoded] = []
    for at, (flying, run) in enumerate(zip(batch.runs, batch.header.runs, strict=True)):
        start = flying.page.offset + run.first * run.part_bytes
        run, payload = encoder.encode(run, arena[start : start + run.payload], flying.page.layout.shape)
        batch.wire[at] = run.wire_bytes
        runs.append(run)
        payloads.append(payload)
    if batch.header.padding:
        payloads.append(bytes(batch.header.padding))
    return link.Batch(batch.header.batch, runs, batch.header.padding), payloads


class RunDecoder(Coder):
    """The receiving side."""

    @property
    def fidelity(self) -> Fidelity:
        """Of the parts that the codec changes."""
        return self.name if self.name in ("fp8", "int8") else ""

    def read(self, run: link.Run, into: memoryview, read_into: ReadInto, shape: PartShape) -> int | None:
        """Reads the wire form of `run` and puts its parts `into` a view of `run.payload` bytes.

        Returns the bitmap of the parts that are not what the sender has, the run's first part being bit 0; None when
        the bytes were no encoding of the run. Raises OSError when the connection breaks.
        """
        assert len(into) == run.payload
        if run.encoding is None:
            read_into(into)
            self.count(run)
            return 0
        encoded = memoryview(bytearray(run.encoding.size))
        read_into(encoded)
        begun = perf_counter()
        inexact = self._decoded(run.encoding, encoded, run, into, shape)
        self.count(run, perf_counter() - begun)
        return inexact

    def _decoded(
        self, encoding: link.Encoding, encoded: memoryview, run: link.Run, into: memoryview, shape: PartShape
    ) -> int | None:
        assert self.codec is not None
        if checksum(encoded) != encoding.checksum:
            return None
        try:
            return self.codec.decode(encoded, into, run.part_bytes, shape)
        except ProtocolError:
            return None

    def discard(self, run: link.Run, read_into: ReadInto) -> None:
        """Reads the wire form of a `run` that nobody needs. Raises OSError when the connection breaks."""
        discard(run.wire_bytes, read_into)
        self.count(run)

    def require_own(self, run: link.Run) -> None:
        """Raises ProtocolError when `run` is encoded otherwise than was negotiated."""
        if run.encoding is not None and run.encoding.codec != self.name:
            raise ProtocolError(f"a run encoded with {run.encoding.codec!r} on a link with codec {self.name!r}")


def discard(size: int, read_into: ReadInto) -> None:
    """Reads so many bytes for nobody. Raises OSError when the connection breaks."""
    scratch = memoryview(bytearray(min(size, _SCRATCH)))
    while size:
        take = min(size, _SCRATCH)
        read_into(scratch[:take])
        size -= take


class LinkCodecs:
    """How each link of a depot encodes. A link that nobody configured here sends parts as they are."""

    def __init__(self) -> None:
        self.encoders: dict[str, RunEncoder] = {}  # by the depot that the link leads to
        self.decoders: dict[str, RunDecoder] = {}  # by the depot that it comes from

    def encoder(self, to: str) -> RunEncoder:
        """Of the link to depot `to`."""
        return self.encoders.setdefault(to, RunEncoder())

    def decoder(self, sender: str) -> RunDecoder:
        """Of the link from depot `sender`."""
        return self.decoders.setdefault(sender, RunDecoder())
