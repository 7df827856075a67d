"""Which pages a request must write to its depot, and when they can be copied out.

Of a window's pages those are written that its prompt's end, or a later hit at its last whole page, looks at; of a
linear state the one at the exact end, and one at the last page's edge when a step ends there.

INV-PUBLISH-1: a page is copied out only in or after the step that computes its last token, a state in that step.
INV-PUBLISH-2: no byte of another request leaves: a block that the prompt fills partly is zeroed before its first token.
INV-PUBLISH-3: a page whose block vLLM took back is not copied.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from pdrelay.depot.base import EngineDepot, PageKind
from pdrelay.engine.vllm.groups import NULL_BLOCK, EngineGroup, PageBlocks, Plan, Tables
from pdrelay.engine.vllm.jobs import Job, PageOf, Write
from pdrelay.engine.vllm.metadata import PageCopy
from pdrelay.errors import ArenaFullError
from pdrelay.kv.demand import first_page
from pdrelay.kv.names import in_group


class Candidate(NamedTuple):
    """A page that the depot may lack."""

    page: PageOf
    kind: PageKind
    tokens: int  # of the request, when the page ends
    required: bool = False


def reserve_prompt(depot: EngineDepot, job: Job, plan: Plan) -> None:
    """Becomes the writer of every prompt page that the depot lacks. Raises ArenaFullError."""
    _reserve(depot, job, _prompt(job, plan))
    job.admitted = True


def adopt_orphans(depot: EngineDepot, job: Job, plan: Plan) -> None:
    """At the prompt's end: becomes the writer of pages whose other writer died. Raises ArenaFullError."""
    if not job.checked and job.admitted:
        job.checked = True
        missed = [item for item in _prompt(job, plan) if item.required and item.page.name not in job.written]
        _reserve(depot, job, missed)


def reserve_edge_state(depot: EngineDepot, job: Job, plan: Plan, end: int) -> None:
    """A step ends at the prompt's last whole page: its state can serve other prompts, if there is room for it."""
    prompt, page_tokens = job.pages.prompt, plan.contract.page_tokens
    if end != len(prompt.full) * page_tokens or not 0 < end < prompt.length:
        return
    index = len(prompt.full) - 1
    states = [number for number, group in enumerate(plan.groups) if group.is_state]
    with suppress(ArenaFullError):
        _reserve(depot, job, [_whole(number, index, prompt.full[index], page_tokens) for number in states])


def reserve_decoded(depot: EngineDepot, job: Job, plan: Plan, whole: list[bytes], start: int, end: int) -> None:
    """Becomes the writer of pages that the step from token `start` to `end` fills. Raises ArenaFullError."""
    page_tokens = plan.contract.page_tokens
    first = start // page_tokens if job.decoded is None else job.decoded
    job.decoded = max(first, len(whole))
    edge = len(whole) * page_tokens
    pages: list[Candidate] = []
    for number, group in enumerate(plan.contract.groups):
        if group.kind == "linear_state" and edge != end:
            continue
        fresh = range(max(first, first_page(group, edge, page_tokens)), len(whole))
        pages += [_whole(number, index, whole[index], page_tokens) for index in fresh]
    _reserve(depot, job, pages)


def due_copies(job: Job, plan: Plan, tables: Tables, start: int, end: int) -> list[PageCopy]:
    """Copies of reserved pages whose tokens are all computed when the step from token `start` to `end` is done."""
    due = [write for write in job.writes if write.tokens <= end]
    if due:
        job.writes = [write for write in job.writes if write.tokens > end]
    copies = []
    for write in due:
        page = write.page
        blocks = plan.groups[page.group].blocks(tables, page.number, plan.contract.page_tokens, write.tokens)
        if _present(plan.groups[page.group], blocks, write.tokens, start, end):
            copies.append(PageCopy(job.write_owner, page.name, page.group, blocks, write.offset))
        elif write.required:
            kind = plan.contract.groups[page.group].kind
            job.fail(f"page {page.number} of the prompt's {kind} was gone after token {end}, found no block to copy")
    return copies


def blocks_to_zero(job: Job, plan: Plan, tables: Tables, start: int, end: int) -> list[tuple[int, int]]:
    """Table and id of blocks that the prompt fills partly, when the step from `start` to `end` writes them first."""
    found: dict[tuple[int, int], None] = {}
    for group in plan.groups:
        index, inside = divmod(job.pages.prompt.length, group.block_tokens)
        if inside and not group.is_state and start <= index * group.block_tokens < end:
            found |= dict.fromkeys((table, tables[table][index]) for table in group.tables)
    return list(found)


def _present(group: EngineGroup, blocks: PageBlocks, tokens: int, start: int, end: int) -> bool:
    if not all(table and NULL_BLOCK not in table for table in blocks):
        return False
    # A running state is overwritten token by token, except that a full block's is kept and copied on.
    return not group.is_state or end == tokens or (start == tokens and tokens % group.block_tokens == 0)


def _prompt(job: Job, plan: Plan) -> list[Candidate]:
    prompt, page_tokens = job.pages.prompt, plan.contract.page_tokens
    edge = len(prompt.full) * page_tokens
    pages: list[Candidate] = []
    for number, group in enumerate(plan.contract.groups):
        first = first_page(group, prompt.length, page_tokens)
        early = min(first, first_page(group, edge, page_tokens)) if group.kind == "sliding_window" else first
        for index in range(early, len(prompt.names)):
            kind = PageKind.PREFIX if index < len(prompt.full) else PageKind.TRANSFER
            page = PageOf(number, index, in_group(prompt.names[index], number))
            pages.append(Candidate(page, kind, prompt.tokens_in(index + 1), index >= first))
    return pages


def _whole(group: int, index: int, name: bytes, page_tokens: int) -> Candidate:
    return Candidate(PageOf(group, index, in_group(name, group)), PageKind.PREFIX, (index + 1) * page_tokens)


def _reserve(depot: EngineDepot, job: Job, pages: list[Candidate]) -> None:
    if not pages:
        return
    offsets = depot.reserve(job.write_owner, [item.page.name for item in pages], [item.kind for item in pages])
    for item, offset in zip(pages, offsets, strict=True):
        if offset is not None:
            job.writes.append(Write(item.page, item.tokens, item.required, offset))
            job.written.add(item.page.name)
