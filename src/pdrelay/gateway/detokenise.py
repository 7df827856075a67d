"""Token ids to text, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pdrelay.gateway.text import REPLACEMENT

_unquoted = msgspec.json.Decoder(str).decode

PRIMER_TOKENS = 8  # of the prompt's end: they decide how the first output token is written
MAX_PENDING = 256  # bounds the work on an endless run of broken characters


class Detokeniser:
    """Writes out tokens as soon as their characters are complete.

    The pieces join to what decoding all output tokens at once gives (INV-TEXT-1), for byte-level tokenizers. With
    byte-fallback ones a broken byte sequence can change characters before it that were shown already; then the pieces
    go on behind them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        whole: Callable[[int], bytes | None] = lambda _: None,
    ) -> None:
        """`whole` knows the text, as JSON, of tokens that read the same whatever stands before them."""
        self._tokenizer, self._skip, self._whole = tokenizer, skip_special_tokens, whole
        self._stale = False  # the stream does not know the latest tokens
        self._context: list[int] = []  # what was written last; the stream compares with it
        self._pending: list[int] = []  # read, but not written yet
        primer = list(prompt[-PRIMER_TOKENS:])
        # A prompt that ends inside a character cannot prime: the stream would give its text out again.
        self._restart([] if self._decode(primer).endswith(REPLACEMENT) else primer)

    def quick(self, token: int) -> bytes | None:
        """The text of one token, as JSON, if it depends on nothing else; None: it has to be pushed."""
        if self._pending or (found := self._whole(token)) is None:
            return None
        self._stale = True
        return found

    def push(self, ids: list[int]) -> str:
        """The text that `ids` complete."""
        if not self._pending:
            quoted = [found for token in ids if (found := self._whole(token)) is not None]
            if len(quoted) == len(ids):
                self._stale = True
                return "".join(map(_unquoted, quoted))
        if self._stale:
            self._restart([])  # what stood before does not matter with such a tokenizer
        self._pending += ids
        try:
            text: str | None = self._stream.step(self._tokenizer, ids)
        except Exception as error:  # tokenizers has no class of its own for this
            if "Invalid prefix" not in str(error):
                raise
            text = self._decode(self._pending)
        else:
            if text is not None:
                self._context, self._pending = self._pending, []
                return text
            if len(self._pending) < MAX_PENDING:
                return ""
            text = self._rest()
        self._restart([])
        return text

    def flush(self) -> str:
        """The rest when no more tokens come: characters that were never completed."""
        rest = self._rest()
        self._restart([])
        return rest

    def _rest(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _restart(self, context: list[int]) -> None:
        self._context, self._pending, self._stale = context, [], False
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        return text
