"""What the options of `pdrelay bench transfer` say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pdrelay.kv.contract import KVContract, KVGroup

PARTS = ("throughput", "shaped", "table2")
"""What can be measured, in the order in which it is."""


Progress = Callable[[str], None]
"""Is told what goes on, for people who wait."""

Kind = Literal["namespaces", "user"]
"""Where a shaped line runs."""


Carrier = Literal["link-fair", "link-srpt", "pool"]
CARRIERS: tuple[Carrier, ...] = ("link-fair", "link-srpt", "pool")
"""Of table2: our link with each schedule, and the published transport, a pool of capped connections, one a transfer."""


class Shape(NamedTuple):
    """Sizes. The defaults are those of a model with 8 KV heads of 128 in bfloat16 and pages of 16 tokens: a part, one
    layer's keys and values, has 64 KiB, and with 32 layers a page has 2 MiB."""

    part_bytes: int = 64 << 10
    parts: int = 32

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.part_bytes * self.parts

    @property
    def contract(self) -> KVContract:
        """The KV contract of the engines at both depots."""
        group = KVGroup(
            layers=self.parts, heads=8, head_size=128, dtype="bfloat16", part_bytes=self.part_bytes, codec="bench"
        )
        return KVContract(model="bench", revision="", page_tokens=16, block_tokens=16, groups=(group,))

    def pages(self, size: int) -> int:
        """Pages that hold `size` bytes, at least one."""
        return max(1, size // self.page_bytes)


class Settings(NamedTuple):
    """The options, checked."""

    parts: Sequence[str] = PARTS
    connections: int = 4
    rounds: int = 7
    shape: Shape = Shape()
    size: int = 512 << 20  # payload of a measurement without a shaped line
    peers: Path = Path("benchmarks", "peers")
    line: Kind | None = None  # None: namespaces if they can be had
    line_rate: str = "1gbit"
    line_rtt: str = "0ms"
    line_seconds: float = 2.0  # of a measurement on the shaped line
    carriers: Sequence[Carrier] = CARRIERS
    scale: float = 100.0  # published rates and sizes over those of the Table 2 experiment
    slower: float = 1.0  # real seconds for one of its seconds
    duration: float = 30.0  # seconds of arrivals for each row of it
    seed: int = 0
    soak: int = 0  # transfers; 0: none
    chunk: int = 1 << 20  # a batch of the link at its largest, so what it gives to a send


class Place(NamedTuple):
    """Directories of one part of a run: its own, and the certificates of all."""

    home: Path
    certificates: Path
