"""Log probabilities in the forms of the OpenAI API and of vLLM, spelled as vLLM spells them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdrelay.engine.logprobs import Logprobs, Row
from pdrelay.gateway.responses import ChatLogprobs, PromptLogprob, TextLogprobs, TokenLogprob, TopLogprob
from pdrelay.gateway.text import REPLACEMENT, Text

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

CONTEXT = 4
"""Tokens that a broken character may begin in: UTF-8 has no longer ones."""


class Candidate(NamedTuple):
    """A token that could be at a position."""

    token: int
    text: str
    value: float
    rank: int


class Position(NamedTuple):
    """One position: the token that is there, and the likeliest ones, itself the first of them if it is among them."""

    token: int
    text: str
    value: float | None  # None at the first token of a prompt
    candidates: list[Candidate]


class Speller:
    """Spells tokens one by one.

    A token that ends inside a character says nothing, the one that completes the character says all of it.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._context: list[int] = []

    def positions(self, rows: Iterable[Row]) -> list[Position]:
        """The positions of consecutive tokens. Continues where the last call ended."""
        return [self._position(row) for row in rows]

    def unknown(self, token: int) -> Position:
        """The position of a token of which no probability is known."""
        return Position(token, self._spell(token, []), None, [])

    def _position(self, row: Row) -> Position:
        # A token comes once, at its first place, with what is said of it last: so do vLLM's dictionaries.
        told: dict[int, tuple[float, int]] = {}
        for place, (token, value) in enumerate(zip(row.ids, row.values, strict=True)):
            told[token] = (max(value, LEAST), place or row.rank)
        candidates = [Candidate(token, self._spell(token, self._context), *told[token]) for token in told]
        self._context = [*self._context, row.ids[0]][-CONTEXT:]
        return Position(candidates[0].token, candidates[0].text, candidates[0].value, candidates)

    def _spell(self, token: int, context: Sequence[int]) -> str:
        text = self._text.piece(token)
        return self._completed(token, context) if text.endswith(REPLACEMENT) else text

    def _completed(self, token: int, context: Sequence[int]) -> str:
        """The character that `token` completes; nothing when it is still incomplete."""
        for count in range(1, len(context) + 1):
            before = list(context[-count:])
            whole = self._text.decode([*before, token])
            if whole.endswith(REPLACEMENT):
                continue
            while before and self._text.decode(before[-1:]).endswith(REPLACEMENT):
                before.pop()  # it said nothing, so its part of the character is told here
            return whole[_common(self._text.decode(before) if before else "", whole) :]
        return ""


def _common(first: str, second: str) -> int:
    """Characters that both begin with."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def chat_logprobs(positions: Sequence[Position], top: int) -> ChatLogprobs:
    """The `logprobs` of a chat completion's choice."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=position.text,
                logprob=LEAST if position.value is None else position.value,
                bytes=_bytes(position.text),
                top_logprobs=[TopLogprob(c.text, c.value, _bytes(c.text)) for c in position.candidates[:top]],
            )
            for position in positions
        ]
    )


def text_logprobs(positions: Sequence[Position], top: int, offset: int) -> TextLogprobs:
    """The `logprobs` of a completion's choice; its first token is `offset` characters behind the beginning."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.text)
    return TextLogprobs(
        text_offset=offsets,
        token_logprobs=[position.value for position in positions],
        tokens=[position.text for position in positions],
        top_logprobs=[
            None if position.value is None else {c.text: c.value for c in position.candidates[: top + 1]}
            for position in positions
        ],
    )


def prompt_logprobs(text: Text, logprobs: Logprobs) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's `prompt_logprobs`: the first prompt token has none."""
    positions = Speller(text).positions(logprobs.rows())
    return [None, *({c.token: PromptLogprob(c.value, c.rank, c.text) for c in p.candidates} for p in positions)]


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))
