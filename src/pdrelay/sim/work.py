"""What an engine computes: known tokens in one go, or new ones step by step."""

from __future__ import annotations

from collections.abc import Callable


class Forward:
    """Known tokens to compute: a prompt's uncached part, or an extension. It holds `reserve` tokens of memory."""

    __slots__ = ("behind", "cancelled", "done", "extend", "on_chunk", "on_done", "reserve", "started", "tokens")

    def __init__(
        self,
        tokens: int,
        behind: int,
        on_done: Callable[[], None],
        *,
        extend: bool = False,
        reserve: int = 0,
        on_chunk: Callable[[int], None] | None = None,
    ) -> None:
        """`behind`: computed tokens before these. `on_chunk` is called at the start of each chunk with the tokens that
        will be done at its end: its layers leave one by one as they are computed."""
        self.tokens, self.behind, self.on_done, self.on_chunk = tokens, behind, on_done, on_chunk
        self.extend, self.reserve = extend, reserve
        self.done = 0
        self.started = -1.0
        self.cancelled = False


class Sequence:
    """A request that decodes `remaining` tokens after `context` ones."""

    __slots__ = (
        "active", "context", "finish_step", "first_token", "join_step", "largest_gap", "made_before", "on_end",
        "preemptions", "remaining", "stopped",
    )  # fmt: skip

    def __init__(self, context: int, remaining: int, on_end: Callable[[], None]) -> None:
        self.context, self.remaining, self.on_end = context, remaining, on_end
        self.active = self.stopped = False
        self.join_step = self.finish_step = 0
        self.made_before = 0  # tokens before it was preempted
        self.first_token = -1.0
        self.largest_gap = 0.0
        self.preemptions = 0


def stale(entry: tuple[int, int, Sequence]) -> bool:
    """True for an end that was set before the sequence left."""
    return not entry[2].active or entry[2].finish_step != entry[0]
