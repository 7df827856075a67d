"""The emulated model: which token follows, and when the output ends. Pure.

The next token is a function of all token ids before it, the seed, the adapter, and the *drift* of the KV it attends to:
a digest of every loaded page whose bytes are not those that its name stands for (`emulated/pages.py`), empty when all
are right. So every correct path through any engines gives one and the same output, and one lost token, wrong splice or
wrong page changes all that follows.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from pdrelay.engine.logprobs import Row
from pdrelay.engine.messages import Sampling
from pdrelay.perf.profile import Vocabulary


class Stop(NamedTuple):
    """Why the output ends with this token."""

    reason: Literal["stop", "length"]
    stop_reason: int | None = None  # the stop token, unless it was the model's EOS


class Output:
    """The tokens of one sequence: the prompt, then the output that grows."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], sampling: Sampling, max_model_len: int, lora: str = ""
    ) -> None:
        self._vocabulary, self._sampling = vocabulary, sampling
        self.token_ids = list(prompt)
        self.prompt_tokens = len(prompt)
        self.limit = min(sampling.max_tokens, max_model_len - len(prompt))
        seed = b"" if sampling.seed is None else sampling.seed.to_bytes(16, "little", signed=True)
        start = blake2b(seed + lora.encode(), digest_size=16, person=b"pdrelay.model").digest()
        self._state = functools.reduce(_advance, prompt, start)

    @property
    def count(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_tokens

    def append(self, ids: Iterable[int]) -> None:
        """Takes output tokens that another engine made."""
        for token in ids:
            self.token_ids.append(token)
            self._state = _advance(self._state, token)

    def predict(self, drift: bytes) -> int:
        """The next token, given the drift of the KV of all before it."""
        forbidden = self._forbidden()
        attempt = 0
        while True:
            token = self._draw(drift, attempt)
            if token not in forbidden:
                return token
            attempt += 1

    def row(self, drift: bytes) -> Row | None:
        """Log probabilities of the next token, if the request asked for them."""
        wanted = self._sampling.logprobs
        return None if wanted is None else _row(self._vocabulary, self._state + drift, self.predict(drift), wanted)

    def generate(self, drift: bytes) -> tuple[int, Stop | None]:
        """Appends the next token; also why it ends the output, if it does."""
        token = self.predict(drift)
        self.append((token,))
        return token, self._stop(token)

    def exhausted(self) -> Stop | None:
        """Why no further token may come, if the limit is reached already."""
        return Stop("length") if self.count >= self.limit else None

    def _draw(self, drift: bytes, attempt: int) -> int:
        data = self._state + attempt.to_bytes(4, "little") + drift
        number = int.from_bytes(blake2b(data, digest_size=16, person=b"pdrelay.draw").digest(), "little")
        chance, number = number & 0xFFFFFFFF, number >> 32
        vocabulary = self._vocabulary
        if chance < vocabulary.eos_probability * 2**32:
            return vocabulary.eos
        return vocabulary.first + number % (vocabulary.last - vocabulary.first + 1)

    def _forbidden(self) -> frozenset[int]:
        """Tokens that would end the output before `min_tokens`."""
        if self.count >= self._sampling.min_tokens:
            return frozenset()
        return frozenset((*self._sampling.stop_token_ids, self._vocabulary.eos))

    def _stop(self, token: int) -> Stop | None:
        if token == self._vocabulary.eos and not self._sampling.ignore_eos:
            return Stop("stop")
        if token in self._sampling.stop_token_ids:
            return Stop("stop", token)
        return self.exhausted()


def reference_tokens(
    prompt: Sequence[int], sampling: Sampling, vocabulary: Vocabulary, max_model_len: int, lora: str = ""
) -> tuple[list[int], Stop]:
    """What one engine alone gives for `prompt`: the output tokens, and why they end."""
    output = Output(vocabulary, prompt, sampling, max_model_len, lora)
    stop = output.exhausted()
    while stop is None:
        _, stop = output.generate(b"")
    return output.token_ids[output.prompt_tokens :], stop


def prompt_rows(prompt: Sequence[int], vocabulary: Vocabulary, wanted: int) -> list[Row]:
    """Log probabilities of every prompt token but the first, with `wanted` likeliest ones each."""
    states = itertools.accumulate(prompt[:-1], _advance, initial=b"prompt")
    return [
        _row(vocabulary, state, token, wanted)
        for state, token in zip(itertools.islice(states, 1, None), prompt[1:], strict=True)
    ]


def _row(vocabulary: Vocabulary, state: bytes, token: int, wanted: int) -> Row:
    """The token is the likeliest one; those beside it follow at equal distances."""
    number = int.from_bytes(blake2b(state, digest_size=4, person=b"pdrelay.logprob").digest(), "little")
    first, size = vocabulary.first, vocabulary.last - vocabulary.first + 1
    others = [first + (token - first + place) % size for place in range(wanted)]
    top = -(1 + number % 1024) / 1024
    return Row([token, *others], [top, *(top - place for place in range(wanted))], 1)


def _advance(state: bytes, token: int) -> bytes:
    return blake2b(state + array("I", (token,)).tobytes(), digest_size=16, person=b"pdrelay.token").digest()
