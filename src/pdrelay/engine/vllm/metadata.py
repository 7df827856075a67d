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


class Load(NamedTuple):
    """Copy pages from the arena into engine blocks, then report the request as received."""

    request_id: str
    pages: list[tuple[int, int]]  # offset in the arena, block


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are untyped here
    """The orders of one step. Offsets hold for the depot process `epoch` (empty: no depot)."""

    epoch: str = ""
    zero: list[int] = field(default_factory=list)  # blocks to zero before the forward pass
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # owners that write nothing any more


@dataclass
class DepotLost(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's classes are untyped here
    """A worker has no connection to the depot processes `epochs`, or lost one: orders were not carried out."""

    epochs: set[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> DepotLost:
        """What several workers tell."""
        assert isinstance(other, DepotLost)
        return DepotLost(self.epochs | other.epochs)
