"""The output text of one request: detokenised, without the stop token, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pdrelay.gateway.base import Finish
from pdrelay.gateway.detokenise import Detokeniser
from pdrelay.gateway.stop import StopMatcher


class Ending(NamedTuple):
    """How an output ended, in OpenAI's and vLLM's terms."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # the stop string or stop token; None at EOS


class Output:
    """Takes token ids in order and gives out text. A token that may be the stop token is held until that is known."""

    def __init__(
        self,
        detokeniser: Detokeniser,
        *,
        stop: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """`stop_ids` end the output. Stop strings that are complete within `min_tokens` tokens do not count."""
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stop, include=include_stop) if stop else None
        self._stop_ids, self._min_tokens, self._include_stop = stop_ids, min_tokens, include_stop
        self._held: list[int] = []
        self._written = 0

    @property
    def tokens(self) -> int:
        """Output tokens so far: through the one that completed a stop string, the stop token included."""
        return self._written + len(self._held)

    @property
    def can_stop(self) -> bool:
        """Whether a stop string may end the output."""
        return self._matcher is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the output."""
        return self._matcher is not None and self._matcher.matched is not None

    def quick(self, token: int) -> bytes | None:
        """Takes one token whose text, which is returned as JSON, depends on nothing else. None: it has to be pushed.

        Only when no stop string can end the output.
        """
        if self._held or token in self._stop_ids or (text := self._detokeniser.quick(token)) is None:
            return None
        self._written += 1
        return text

    def push(self, ids: list[int]) -> str:
        """The text that `ids` complete."""
        if self._held:
            ids = self._held + ids
        self._held = ids[-1:] if ids and ids[-1] in self._stop_ids else []
        text = self._write(ids[:-1] if self._held else ids)
        if self.stopped:
            self._held = []
        return text

    def finish(self, finish: Finish) -> str:
        """The rest of the text at the natural end."""
        held, self._held = self._held, []
        if finish.reason == "stop" and not self._include_stop:
            self._written += len(held)
            text = ""
        else:
            text = self._write(held)
        return text if self.stopped else text + self._flush()

    def ending(self, finish: Finish | None) -> Ending:
        """How it ended; `finish` is the stream's, None when a stop string ended it."""
        if self._matcher is not None and self._matcher.matched is not None:
            return Ending("stop", self._matcher.matched)
        assert finish is not None
        return Ending(finish.reason, finish.stop_reason)

    def _write(self, ids: list[int]) -> str:
        if self._matcher is None:
            self._written += len(ids)
            return self._detokeniser.push(ids) if ids else ""
        text = ""
        for token in ids:
            self._written += 1
            text += self._matcher.push(self._detokeniser.push([token]), armed=self._written > self._min_tokens)
            if self._matcher.matched is not None:
                break
        return text

    def _flush(self) -> str:
        rest = self._detokeniser.flush()
        if self._matcher is None:
            return rest
        text = self._matcher.push(rest, armed=self._written > self._min_tokens)
        return text if self.stopped else text + self._matcher.flush()
