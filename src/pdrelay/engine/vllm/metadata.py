"""What the scheduler's side of the connector orders its worker side to do in one step, and what that tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


class PageCopy(NamedTuple):
    """Copy engine block `block`, computed when this step ends, to `offset` of the arena, as page `name` of `owner`."""

    owner: str
    name: bytes
    block: int
    offset: int


class PageLoad(NamedTuple):
    """Copy the page at `offset` of the arena into engine block `block`, if its parts have these checksums."""

    name: bytes
    offset: int
    block: int
    checksums: bytes  # packed as in `depot/checksums.py`


class Load(NamedTuple):
    """Copy pages that `owner` leases from the arena into engine blocks, then report the request as received."""

    request_id: str
    owner: str
    pages: list[PageLoad]


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are untyped here
    """The orders of one step. Offsets hold for the depot process `epoch` (empty: no depot)."""

    epoch: str = ""
    zero: list[int] = field(default_factory=list)  # blocks to zero before the forward pass
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # owners that write nothing any more


@dataclass
class Troubles(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's classes are untyped here
    """What went wrong at a worker."""

    lost: set[str] = field(default_factory=set)  # depot processes without connection: orders were not carried out
    spoiled: set[str] = field(default_factory=set)  # requests whose load met a corrupt page, which the depot dropped

    def __bool__(self) -> bool:
        return bool(self.lost or self.spoiled)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Troubles:
        """What several workers tell."""
        assert isinstance(other, Troubles)
        return Troubles(self.lost | other.lost, self.spoiled | other.spoiled)
