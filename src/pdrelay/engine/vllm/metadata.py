"""What the scheduler's side of the connector orders its worker side to do in one step, and what that tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from pdrelay.engine.vllm.groups import PageBlocks


class PageCopy(NamedTuple):
    """Copy engine blocks, computed when this step ends, to `offset` of the arena, as page `name` of `owner`."""

    owner: str
    name: bytes
    group: int
    blocks: PageBlocks
    offset: int


class PageLoad(NamedTuple):
    """Copy the page at `offset` of the arena into engine blocks (but null ones), if its parts have these checksums."""

    name: bytes
    group: int
    offset: int
    blocks: PageBlocks
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
    zero: list[tuple[int, int]] = field(default_factory=list)  # block tables and blocks to zero before the forward pass
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)  # owners that write nothing any more


@dataclass
class News(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's classes are untyped here
    """What a worker has to tell after a step."""

    lost: set[str] = field(default_factory=set)  # depot processes without connection: orders were not carried out
    spoiled: set[str] = field(default_factory=set)  # requests whose load met a corrupt page, which the depot dropped
    finished: set[str] = field(default_factory=set)  # owners all of whose copies the depot knows of

    def __bool__(self) -> bool:
        return bool(self.lost or self.spoiled or self.finished)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> News:
        """What several workers tell: all of them answer to the same step."""
        assert isinstance(other, News)
        return News(self.lost | other.lost, self.spoiled | other.spoiled, self.finished | other.finished)
