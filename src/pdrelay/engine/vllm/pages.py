"""Page names of a request that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pdrelay.kv.names import Item, PromptPages, Scope, extend_pages, prompt_pages, root

scope_root = lru_cache(maxsize=1024)(root)


class Naming(NamedTuple):
    """What names the pages of one request besides its tokens."""

    scope: Scope
    key: bytes
    page_tokens: int


class RequestPages:
    """Names of a request's pages: its prompt's, tail included, and whole pages of all its tokens.

    `prompt` holds the tokens that a prompt's pages cover; with linear states that is one less than it has.
    """

    def __init__(self, naming: Naming, prompt: Sequence[int], items: Sequence[Item] = ()) -> None:
        """`items` are what the prompt holds besides text."""
        self._naming, self._items = naming, items
        self._root = scope_root(naming.scope, naming.key)
        self.prompt: PromptPages = prompt_pages(prompt, naming.page_tokens, self._root, naming.key, items)
        self._full = list(self.prompt.full)

    def full(self, token_ids: Sequence[int], length: int) -> list[bytes]:
        """Names of the whole pages among the first `length` tokens. Tokens once passed must never change."""
        page_tokens = self._naming.page_tokens
        count = length // page_tokens
        if count > len(self._full):
            key, items = self._naming.key, self._items
            self._full += extend_pages(self._full, token_ids, page_tokens, self._root, key, length, items)
        return self._full[:count]

    def prefixes(self, token_ids: Sequence[int], length: int) -> list[PromptPages]:
        """Pages of the first `length` tokens that the request could start from, most tokens first."""
        whole = self.full(token_ids, length)
        if len(whole) <= len(self.prompt.full):
            return [self.prompt]
        page_tokens = self._naming.page_tokens
        return [PromptPages(tuple(whole), None, page_tokens, len(whole) * page_tokens), self.prompt]
