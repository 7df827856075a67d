"""Names of KV pages: what a page *means*, never how a copy is stored.

A name is a chained keyed 256-bit BLAKE2b hash over everything that decides the KV of a token: model and revision,
LoRA, cache salt, multimodal content, and all token ids up to the end of the page. The chain advances over small
fleet-wide units of `UNIT_TOKENS` tokens, so engines with unlike block sizes can name the same KV: a page is a run
of whole units that is also a run of whole engine blocks.

Models whose layers keep KV in several groups have one page a group for the same tokens: the name of a page of group g
is the logical name, followed by one byte g unless g is 0.

An image, or whatever else a model reads besides tokens, is an *item*: it enters the chain with the unit in which it
starts. So the pages before an image are those of the same text without it, and all later ones depend on what it shows.

The key is a fleet secret: without it nobody can guess a name and probe whether another tenant's prompt is cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

UNIT_TOKENS = 16
"""Tokens by which the chain advances; every page and engine block is a multiple of it."""

NAME_BYTES = 32


class Scope(NamedTuple):
    """All that decides a token's KV besides the tokens before it."""

    model: str
    revision: str = ""
    lora: str = ""  # adapter, with what tells apart its versions
    cache_salt: str = ""


class Item(NamedTuple):
    """Content that is not text."""

    position: int  # of its first placeholder token in the prompt
    content: str  # hash of it, the same wherever it is read


class PromptPages(NamedTuple):
    """The pages of a prompt: whole pages, then the tail that ends inside a page."""

    full: tuple[bytes, ...]  # prefix pages: reusable by any prompt that starts alike
    tail: bytes | None  # transfer page: valid at this exact length only; None when the prompt ends on a page's edge
    page_tokens: int
    length: int  # tokens

    @property
    def names(self) -> tuple[bytes, ...]:
        """All names in token order."""
        return self.full if self.tail is None else (*self.full, self.tail)

    def tokens_in(self, pages: int) -> int:
        """Tokens that the first `pages` pages cover."""
        return min(pages * self.page_tokens, self.length)


def in_group(name: bytes, group: int) -> bytes:
    """The name of the page of KV group `group` for the tokens of logical name `name`."""
    return name + bytes((group,)) if group else name


def group_of(name: bytes) -> int:
    """The KV group of a page's name."""
    return name[NAME_BYTES] if len(name) > NAME_BYTES else 0


def root(scope: Scope, key: bytes) -> bytes:
    """The chain's start for `scope`. Fields are length-prefixed, so no two scopes share an encoding."""
    state = blake2b(key=key, digest_size=NAME_BYTES, person=b"pdrelay.root")
    fields = (scope.model, scope.revision, scope.lora, scope.cache_salt)
    for text in fields:
        data = text.encode()
        state.update(len(data).to_bytes(4, "little") + data)
    return state.digest()


def advance(state: bytes, unit: bytes, key: bytes) -> bytes:
    """The chain after one more unit; `unit` holds its token ids as little-endian uint32."""
    return blake2b(state + unit, key=key, digest_size=NAME_BYTES, person=b"pdrelay.unit").digest()


def prompt_pages(
    token_ids: Sequence[int], page_tokens: int, scope_root: bytes, key: bytes, items: Sequence[Item] = ()
) -> PromptPages:
    """Names of all pages of `token_ids`, with `items` in the order of their positions.

    Raises ValueError when `page_tokens` is not a multiple of the unit.
    """
    if page_tokens <= 0 or page_tokens % UNIT_TOKENS:
        raise ValueError(f"page of {page_tokens} tokens is not a multiple of the unit of {UNIT_TOKENS}")
    data, length = _packed(token_ids), len(token_ids)
    full: list[bytes] = []
    state = scope_root
    units_per_page = page_tokens // UNIT_TOKENS
    whole_units = length // page_tokens * units_per_page
    begin: dict[int, list[Item]] = {}  # items by the unit in which they start
    for item in items:
        if item.position < length:
            begin.setdefault(item.position // UNIT_TOKENS, []).append(item)
    for index in range(whole_units):
        if index in begin:
            state = _with_items(state, begin[index], index * UNIT_TOKENS, key)
        state = advance(state, data[index * UNIT_BYTES : (index + 1) * UNIT_BYTES], key)
        if (index + 1) % units_per_page == 0:
            full.append(state)
    rest = data[whole_units * UNIT_BYTES :]
    late = [item for unit in sorted(begin) if unit >= whole_units for item in begin[unit]]
    state = _with_items(state, late, whole_units * UNIT_TOKENS, key)
    tail = _tail_name(state, rest, key) if rest else None
    return PromptPages(tuple(full), tail, page_tokens, length)


def extend_pages(
    pages: Sequence[bytes],
    token_ids: Sequence[int],
    page_tokens: int,
    scope_root: bytes,
    key: bytes,
    length: int | None = None,
    items: Sequence[Item] = (),
) -> list[bytes]:
    """Names of the whole pages of `token_ids` that come after the known ones, `pages`; costs only the new tokens.

    `length` takes the first so many tokens only.
    """
    known = len(pages)
    rest = [Item(at - known * page_tokens, content) for at, content in items if at >= known * page_tokens]
    state = pages[-1] if pages else scope_root
    fresh = token_ids[known * page_tokens : (len(token_ids) if length is None else length) // page_tokens * page_tokens]
    return list(prompt_pages(fresh, page_tokens, state, key, rest).full)


UNIT_BYTES = UNIT_TOKENS * 4


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def _with_items(state: bytes, items: Sequence[Item], start: int, key: bytes) -> bytes:
    """The chain, once it knows the items that begin after token `start`."""
    for position, content in items:
        where = (position - start).to_bytes(4, "little")
        data = state + where + content.encode()
        state = blake2b(data, key=key, digest_size=NAME_BYTES, person=b"pdrelay.item").digest()
    return state


def _tail_name(state: bytes, rest: bytes, key: bytes) -> bytes:
    # Another personalisation than whole units: a tail can never be taken for the first unit of a page.
    return blake2b(state + rest, key=key, digest_size=NAME_BYTES, person=b"pdrelay.tail").digest()
