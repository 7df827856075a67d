"""Which pages of a model with several KV groups a request needs, and where it can start from those that are there.

- Full attention and MLA need every page of the prompt.
- A sliding window needs the pages that its last `window` tokens reach into.
- A linear state is one page: the state after exactly so many tokens.

Sampling needs the last prompt token computed again, so a window begins one token earlier than the next token's. A state
cannot be taken back by a token: models with linear states publish the pages of the prompt without its last token, which
the decoding engine computes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import PromptPages, in_group


class Demand(NamedTuple):
    """Pages that must exist where a request is to decode."""

    names: tuple[bytes, ...]  # in token order, transfer pages last
    tails: int  # how many of the last names are transfer pages


def published_tokens(prompt_tokens: int, groups: Sequence[KVGroup]) -> int:
    """How many tokens of a prompt its pages cover."""
    return prompt_tokens - any(group.kind == "linear_state" for group in groups)


def demand(pages: PromptPages, groups: Sequence[KVGroup]) -> Demand:
    """The pages that a request with these prompt pages loads, when it starts at the prompt's end."""
    by_page: list[list[bytes]] = [[] for _ in pages.names]
    for number, group in enumerate(groups):
        for index in range(first_page(group, pages.length, pages.page_tokens), len(by_page)):
            by_page[index].append(in_group(pages.names[index], number))
    names = tuple(name for page in by_page for name in page)
    return Demand(names, len(by_page[-1]) if pages.tail is not None else 0)


def usable_prefix(pages: PromptPages, groups: Sequence[KVGroup], has: Callable[[bytes], bool]) -> int:
    """Tokens of the longest prefix from which a request can go on, given which page names there are.

    Prefixes end on a page's edge, or at the prompt's end.
    """
    growing = [number for number, group in enumerate(groups) if grows(group)]
    leading = 0
    for name in pages.names:
        if not all(has(in_group(name, number)) for number in growing):
            break
        leading += 1
    others = [(number, group) for number, group in enumerate(groups) if number not in growing]
    for count in range(leading, 0, -1):
        if all(has(name) for name in _behind(pages, others, count)):
            return pages.tokens_in(count)
    return 0


def first_page(group: KVGroup, tokens: int, page_tokens: int) -> int:
    """Index of the first page of `group` that a request needs to go on after its first `tokens` tokens."""
    if group.kind == "linear_state":
        return max(0, -(-tokens // page_tokens) - 1)
    if group.kind == "sliding_window":
        return max(0, tokens - group.window) // page_tokens
    return 0


def grows(group: KVGroup) -> bool:
    """Whether a request needs all pages of `group`, from the first token on."""
    return group.kind in ("full_attention", "mla")


def most_prompt_tokens(capacity: int, contract: KVContract) -> int:
    """Tokens of the longest prompt whose pages fit into `capacity` bytes together."""
    fixed = growing = 0
    for group, layout in zip(contract.groups, contract.layouts, strict=True):
        if grows(group):
            growing += layout.page_bytes
        else:
            reach = -(-group.window // contract.page_tokens) + 1 if group.kind == "sliding_window" else 1
            fixed += reach * layout.page_bytes
    if not growing:
        return contract.page_tokens * (1 << 32) if fixed <= capacity else 0
    return max(0, capacity - fixed) // growing * contract.page_tokens


def _behind(pages: PromptPages, others: Sequence[tuple[int, KVGroup]], count: int) -> Iterator[bytes]:
    """Pages of windows and states that a request needs to go on after the first `count` pages."""
    tokens = pages.tokens_in(count)
    for number, group in others:
        for index in range(first_page(group, tokens, pages.page_tokens), count):
            yield in_group(pages.names[index], number)
