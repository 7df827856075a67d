"""What a request loads from its depot: the longest prefix that every KV group can go on from.

A prefix needs every page of groups that grow with the request, the pages that a window at its end reaches into, and
the state after exactly its tokens. Whole pages of growing groups that the engine's own cache has are not loaded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdrelay.depot.base import EngineDepot
from pdrelay.engine.vllm.jobs import Job, Lease, PageOf
from pdrelay.kv.contract import KVGroup
from pdrelay.kv.demand import first_page, grows, usable_prefix
from pdrelay.kv.names import PromptPages, in_group


class Found(NamedTuple):
    """What `take_lease` gives."""

    lease: Lease | None = None
    coming: int = 0  # pages that the depot reads back from disk: ask again for more


def take_lease(depot: EngineDepot, job: Job, groups: Sequence[KVGroup], first: int) -> Found:
    """Leases what the request can use beyond its first `first` pages. Without a lease it holds nothing."""
    limit = job.request.num_tokens - any(group.kind == "linear_state" for group in groups)
    prefixes = job.pages.prefixes(job.request.all_token_ids, limit)
    longest = prefixes[0]
    if longest.length <= first * longest.page_tokens:
        return Found()
    wanted = needed(longest, groups, longest.length, first)
    leased, coming = depot.lease(job.load_owner, [page.name for page in wanted])
    if len(leased) == len(wanted):
        return Found(Lease(first, list(zip(wanted, leased, strict=True)), longest.length))
    growing = sum(map(grows, groups))
    whole = len(leased) // growing if growing else 0
    alone = len(prefixes) == 1
    if alone and whole and growing == len(groups):  # the leading pages are a prefix
        pages = list(zip(wanted, leased, strict=False))[: whole * growing]
        return Found(Lease(first, pages, (first + whole) * longest.page_tokens), coming)
    if leased:
        depot.release(job.load_owner)
    if alone and growing and not whole:
        return Found(coming=coming)
    return _shorter(depot, job, groups, prefixes, first)


def needed(pages: PromptPages, groups: Sequence[KVGroup], tokens: int, first: int) -> list[PageOf]:
    """Pages to load to go on after `tokens` tokens: growing groups' in token order, then the others'."""
    count = -(-tokens // pages.page_tokens)
    growing = [number for number, group in enumerate(groups) if grows(group)]
    places = [(number, index) for index in range(first, count) for number in growing]
    for number, group in enumerate(groups):
        if number not in growing:
            places += [(number, index) for index in range(first_page(group, tokens, pages.page_tokens), count)]
    return [PageOf(number, index, in_group(pages.names[index], number)) for number, index in places]


def _shorter(
    depot: EngineDepot, job: Job, groups: Sequence[KVGroup], prefixes: Sequence[PromptPages], first: int
) -> Found:
    names = [in_group(name, number) for name in _names(prefixes) for number in range(len(groups))]
    have = {name for name, there in zip(names, depot.holds(names), strict=True) if there}
    own = [number for number, group in enumerate(groups) if grows(group)]
    have |= {in_group(name, number) for name in prefixes[0].names[:first] for number in own}
    tokens, pages = max(
        ((usable_prefix(pages, groups, have.__contains__), pages) for pages in prefixes), key=lambda found: found[0]
    )
    if tokens <= first * pages.page_tokens:
        return Found()
    wanted = needed(pages, groups, tokens, first)
    leased, coming = depot.lease(job.load_owner, [page.name for page in wanted])
    if len(leased) == len(wanted):
        return Found(Lease(first, list(zip(wanted, leased, strict=True)), tokens))
    if leased:  # some come from disk, or went meanwhile
        depot.release(job.load_owner)
    return Found(coming=coming)


def _names(prefixes: Sequence[PromptPages]) -> list[bytes]:
    return list(dict.fromkeys(name for pages in prefixes for name in pages.names))
