"""How vLLM keeps the KV groups of a contract: layers, block tables, and what each rank has of a block.

vLLM groups layers for its own ends: layers that keep their KV alike may have several block tables, and layers that do
not may share one. A part of a page is one share of one layer: the same stretch of each engine block that the page
spans, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdrelay.kv.contract import KVContract

NULL_BLOCK = 0
"""vLLM's block for tokens whose KV is gone."""

Tables = Sequence[Sequence[int]]
"""A request's block ids by block table."""

PageBlocks = tuple[tuple[int, ...], ...]
"""The engine blocks of a page, by the block tables of its group."""


class LayerOf(NamedTuple):
    """One layer of a group."""

    name: str
    table: int  # number of its block table


class EngineGroup(NamedTuple):
    """One group of the contract, as this engine keeps it."""

    layers: tuple[LayerOf, ...]  # in model order
    block_tokens: int
    block_bytes: int  # of one layer and rank, without padding
    ranks: int  # tensor-parallel ranks
    copies: int  # ranks that keep the same share of each layer
    is_state: bool = False

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of its block tables."""
        return tuple(sorted({layer.table for layer in self.layers}))

    @property
    def shares(self) -> int:
        """Different shares of a layer that the ranks keep together."""
        return self.ranks // self.copies

    def blocks(self, tables: Tables, page: int, page_tokens: int, tokens: int) -> PageBlocks:
        """The blocks of page `page`, whose last token is the request's `tokens`-th. A state is one block."""
        if self.is_state:
            last = -(-tokens // self.block_tokens) - 1
            return tuple(tuple(tables[table][last : last + 1]) for table in self.tables)
        per_page = page_tokens // self.block_tokens
        return tuple(tuple(tables[table][page * per_page : (page + 1) * per_page]) for table in self.tables)


class Share(NamedTuple):
    """What one rank has to do with the parts of a layer."""

    first: int  # of the shards that it keeps
    parts: int
    writes: bool  # among the ranks that keep the same it is the one that copies them out


class Plan(NamedTuple):
    """A contract, and how this engine keeps each of its groups."""

    contract: KVContract
    groups: tuple[EngineGroup, ...]

    def share(self, group: int, rank: int) -> Share:
        """The share of tensor-parallel rank `rank` in `group`."""
        kept = self.groups[group]
        parts = self.contract.shards // kept.shares
        return Share(rank // kept.copies * parts, parts, rank % kept.copies == 0)

    def blocks_per_page(self, group: int) -> int:
        """Engine blocks of one table that a whole page spans."""
        kept = self.groups[group]
        return 1 if kept.is_state else self.contract.page_tokens // kept.block_tokens
