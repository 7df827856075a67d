"""Prompts whose prefixes are shared exactly as a trace says, in token ids or in words.

A block id is a fixed run of random tokens, so equal ids are equal text and unlike ids differ within their first
tokens. Tokens behind the last block are the request's own. A workload that is known by its hit rates only
shares one text, the warm one, which every cache must have been shown before (`Prompts.warm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdrelay.errors import ConfigError
from pdrelay.workload.base import Request

CACHED_BLOCKS = 8192

_BLOCK, _OWN, _WARM = range(3)  # what a run of tokens is for: no two kinds are alike


class Scale(NamedTuple):
    """How lengths are changed to suit a machine."""

    length: float = 1.0  # of prompts and of their blocks
    output: float = 1.0

    def apply(self, request: Request) -> Request:
        """The request and all that follow it, scaled. Blocks have whole tokens: take `exact` for how many."""
        turns = [self._one(turn) for turn in request.turns()]
        head = turns[-1]
        for turn in reversed(turns[:-1]):
            head = turn._replace(then=head)
        return head

    def _one(self, request: Request) -> Request:
        length = self.exact(request.block_tokens) if request.blocks else self.length
        prompt = max(1, round(request.prompt * length))
        return request._replace(
            prompt=prompt,
            output=max(1, round(request.output * self.output)),
            cached=min(round(request.cached * length), prompt - 1) if request.cached >= 0 else -1,
            block_tokens=round(request.block_tokens * length),
            then=None,
        )

    def exact(self, block_tokens: int) -> float:
        """The factor on prompts that are cut into blocks of `block_tokens`: the nearest with whole blocks."""
        return max(1, round(block_tokens * self.length)) / block_tokens


class Prompts:
    """Makes prompts out of an alphabet of `size` symbols, the same for the same seed."""

    def __init__(self, size: int, seed: int = 0) -> None:
        if size < 2:
            raise ConfigError(f"prompts: found an alphabet of {size}, expected two symbols at least")
        self._size, self._seed = size, seed
        self._block = lru_cache(CACHED_BLOCKS)(self._run)
        self._warm: Sequence[int] = ()

    def symbols(self, number: int, request: Request) -> list[int]:
        """The prompt of request `number` in symbols from 0."""
        shared = self._shared(request)
        own = request.prompt - len(shared)
        return [*shared, *self._run(_OWN, number, own)]

    def warm(self, length: int) -> list[int]:
        """The text of which workloads with declared hits share a beginning."""
        if length > len(self._warm):
            self._warm = self._run(_WARM, 0, 2 * length)  # a longer run begins with the shorter one
        return list(self._warm[:length])

    def _shared(self, request: Request) -> list[int]:
        if request.cached >= 0:
            return self.warm(request.cached)
        found: list[int] = []
        for block in request.blocks:
            found += self._block(_BLOCK, block, request.block_tokens)
        return found[: request.prompt]

    def _run(self, kind: int, number: int, length: int) -> Sequence[int]:
        seed = np.random.SeedSequence((self._seed, kind, number % 2**64))
        found: Sequence[int] = np.random.Generator(np.random.PCG64(seed)).integers(0, self._size, length).tolist()
        return found
