"""One output stream out of several engines' streams, spliced by index."""

from __future__ import annotations

from pdrelay.engine.logprobs import Logprobs
from pdrelay.errors import EngineError
from pdrelay.gateway.base import Tier, TokenBatch


class Splice:
    """The output of one request so far.

    INV-STREAM-1: indices are emitted once, in order. Index `i + 1` is accepted only after `i`, from whichever engine
    is ahead; what another engine already delivered is dropped.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.made_by: dict[Tier, int] = dict.fromkeys(Tier, 0)

    def append(self, ids: list[int], tier: Tier) -> None:
        """Takes `ids`, which are known to follow."""
        self.tokens += ids
        self.made_by[tier] += len(ids)

    def accept(
        self, index: int, ids: list[int], tier: Tier, limit: int | None = None, logprobs: Logprobs | None = None
    ) -> TokenBatch | None:
        """The part of `ids`, which start at `index`, that is new and below `limit`; None when nothing is.

        `logprobs` are those of `ids` and are cut in the same way.

        Raises EngineError when tokens between the known ones and `index` are missing.
        """
        start = len(self.tokens)
        if index > start:
            raise EngineError(f"{tier.value} engine sent index {index}, but {start} is next")
        end = index + len(ids) if limit is None else min(index + len(ids), limit)
        part = slice(start - index, end - index)
        fresh = ids[part] if end > start else []
        if not fresh:
            return None
        self.append(fresh, tier)
        return TokenBatch(start, fresh, tier, logprobs and logprobs[part])
