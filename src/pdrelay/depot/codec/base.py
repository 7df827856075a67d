"""The seam of wire codecs: how the parts of a run travel when a link is configured to spend cores to save line."""

from __future__ import annotations

from typing import Protocol

from pdrelay.cluster.topology import CodecName
from pdrelay.kv.shape import PartShape

STEP_BYTES = 1 << 17
"""Arrays are worked on in steps of about so many payload bytes: scratch stays in the cache, and bounded."""


Encoded = bytes | bytearray | memoryview


class WireCodec(Protocol):
    """Turns the parts of a run into fewer bytes and back. Pure and thread-safe; works without the GIL where it can.

    A run is a whole number of parts of `part_bytes` bytes, all of one `shape`.
    """

    @property
    def name(self) -> CodecName:
        """What links are configured with, and what runs say."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        ...

    def encode(self, parts: memoryview, part_bytes: int, shape: PartShape) -> Encoded | None:
        """The run in fewer bytes than `parts` has; None when that does not succeed, and the run goes as it is."""
        ...

    def decode(self, encoded: memoryview, into: memoryview, part_bytes: int, shape: PartShape) -> int:
        """Fills `into`, which is exactly as long as what was encoded; bitmap of the parts that are not exact.

        Allocates no more than a small multiple of `into`, whatever `encoded` holds. Raises ProtocolError when
        `encoded` is not the encoding of so many parts; `into` may be partly written then.
        """
        ...
