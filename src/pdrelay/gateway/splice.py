"""One output stream out of several engines' streams, spliced by index."""

from __future__ import annotations

from bisect import bisect_right

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
        self._starts: list[int] = []  # where another instance began to make tokens ...
        self._makers: list[tuple[Tier, str]] = []  # ... and which
        self._made = dict.fromkeys(Tier, 0)  # by those before the latest

    @property
    def maker(self) -> str | None:
        """The instance that made the latest token."""
        return self._makers[-1][1] if self._makers else None

    def maker_of(self, index: int) -> str:
        """The instance that made token `index`, which is known."""
        return self._makers[bisect_right(self._starts, index) - 1][1]

    def made_by(self, tier: Tier) -> int:
        """Tokens that engines of `tier` made."""
        return self._made[tier] + (self._latest if self._makers and self._makers[-1][0] is tier else 0)

    @property
    def _latest(self) -> int:
        return len(self.tokens) - self._starts[-1]

    def accept(
        self,
        index: int,
        ids: list[int],
        tier: Tier,
        instance: str,
        limit: int | None = None,
        logprobs: Logprobs | None = None,
    ) -> TokenBatch | None:
        """The part of `ids`, which `instance` made from `index` on, that is new and below `limit`; None for nothing.

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
        if not self._makers or self._makers[-1] != (tier, instance):
            if self._makers:
                self._made[self._makers[-1][0]] += self._latest
            self._starts.append(start)
            self._makers.append((tier, instance))
        self.tokens += fresh
        return TokenBatch(start, fresh, tier, logprobs and logprobs[part])
