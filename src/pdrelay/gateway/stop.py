"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided, so no part of a stop string is
    ever shown (INV-STOP-1). Among several stop strings the one that is complete first wins, then the first in the list.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """With `include` the stop string itself is passed on as well, and nothing needs to be held back."""
        self._stop, self._include = stop, include
        self._open = ""  # longest end of the text so far that begins a stop string
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Takes the next piece and returns what can be shown now. Unless `armed`, no match may end in this piece."""
        assert self.matched is None, "INV-STOP-1: text after a stop string"
        if not text:
            return ""
        shown = len(self._open) if self._include else 0
        joined = self._open + text
        if armed and (found := self._first_match(joined, len(self._open))) is not None:
            start, self.matched = found
            self._open = ""
            return joined[shown : start + len(self.matched) if self._include else start]
        self._open = joined[self._open_from(joined) :]
        return joined[shown:] if self._include else joined[: len(joined) - len(self._open)]

    def flush(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._open = self._open, ""
        return "" if self._include else held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first, among those that end after the first `old` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = start, stop
        return best

    def _open_from(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning, but not all, of a stop string."""
        return min((_open_from(text, stop) for stop in self._stop), default=len(text))


def _open_from(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
