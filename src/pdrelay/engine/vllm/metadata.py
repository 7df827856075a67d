"""What the scheduler's side of the connector orders its worker side to do in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


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
    """The orders of one step. Offsets hold for the depot connection `generation` (0: no depot)."""

    generation: int = 0
    zero: list[int] = field(default_factory=list)  # blocks to zero before the forward pass
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # owners that write nothing any more
