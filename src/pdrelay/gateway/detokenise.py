"""Token ids to text, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pdrelay.gateway.text import REPLACEMENT

Whole = Callable[[int], str | None]

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
        whole: Whole | None = None,
    ) -> None:
        """`whole` knows the text of tokens that read the same whatever stands before them."""
        self._tokenizer, self._skip, self._whole = tokenizer, skip_special_tokens, whole
        self._stale = False  # the stream does not know the latest tokens
        self._context: list[int] = []  # what was written last; the stream compares with it
        self._pending: list[int] = []  # read, but not written yet
        primer = list(prompt[-PRIMER_TOKENS:])
        # A prompt that ends inside a character cannot prime: the stream would give its text out again.
        self._restart([] if self._decode(primer).endswith(REPLACEMENT) else primer)

    def one(self, ids: list[int]) -> str:
        """As `push`, quicker for a single token."""
        if self._whole is not None and not self._pending and (text := self._whole(ids[0])) is not None:
            self._stale = True
            return text
        return self.push(ids)

    def push(self, ids: list[int]) -> str:
        """The text that `ids` complete."""
        if self._whole is not None and not self._pending:
            texts = [whole for token in ids if (whole := self._whole(token)) is not None]
            if len(texts) == len(ids):
                self._stale = True
                return texts[0] if len(texts) == 1 else "".join(texts)
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
