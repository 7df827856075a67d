"""Requests as a trace or a generator gives them: lengths, arrival, and which prefix they share with whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BLOCK_TOKENS = 512
"""Tokens of one prefix block in the Mooncake form."""


class Request(NamedTuple):
    """One request.

    Prefix sharing is said in one of two ways. `blocks`: one id for each `block_tokens` tokens of the prompt, the last
    one for what is left; equal ids mean an equal prefix up to and including that block. `cached`: tokens that every
    cache holds already, for workloads that are known by their hit rate only; -1 leaves it to `blocks`.
    """

    arrival: float  # seconds; of a session's later turns 0, see `then`
    prompt: int  # tokens
    output: int  # tokens
    blocks: tuple[int, ...] = ()
    cached: int = -1
    session: str = ""
    think: float = 0.0  # seconds between the end of the turn before and this one
    then: Request | None = None  # the session's next turn, sent `think` seconds after this one ends
    block_tokens: int = BLOCK_TOKENS

    def turns(self) -> Iterator[Request]:
        """This request and all that follow it in its session."""
        turn: Request | None = self
        while turn is not None:
            yield turn
            turn = turn.then


class Trace(NamedTuple):
    """A trace in memory, by arrival."""

    requests: list[Request]
    skipped: int = 0  # rows that could not be read
    complaints: tuple[str, ...] = ()  # about the first of them


def prefix_hits(requests: Iterable[Request]) -> Iterator[float]:
    """Each request's hit rate in one cache that never evicts, in the order given."""
    seen: set[int] = set()
    for first in requests:
        for request in first.turns():
            if request.cached >= 0:
                yield request.cached / request.prompt
                continue
            hits = 0
            for block in request.blocks:
                if block not in seen:
                    break
                hits += 1
            seen.update(request.blocks)
            yield min(hits * request.block_tokens, request.prompt) / request.prompt
