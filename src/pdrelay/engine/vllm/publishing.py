"""Which pages a request must write to its depot, and when they can be copied out.

INV-PUBLISH-1: a page is copied out only in or after the step that computes its last token.
INV-PUBLISH-2: no byte of another request leaves: a block that the prompt fills partly is zeroed before its first token.
"""

from __future__ import annotations

from typing import NamedTuple

from pdrelay.depot.base import EngineDepot, PageKind
from pdrelay.engine.vllm.jobs import Job, Write
from pdrelay.engine.vllm.metadata import PageCopy


class Candidate(NamedTuple):
    """A page that the depot may lack."""

    page: int
    name: bytes
    kind: PageKind


def reserve_prompt(depot: EngineDepot, job: Job) -> None:
    """Becomes the writer of every prompt page that the depot lacks. Raises ArenaFullError."""
    _reserve(depot, job, _prompt(job))
    job.admitted = True


def adopt_orphans(depot: EngineDepot, job: Job) -> None:
    """At the prompt's end: becomes the writer of pages whose other writer died. Raises ArenaFullError."""
    if not job.checked and job.admitted:
        job.checked = True
        _reserve(depot, job, [item for item in _prompt(job) if item.page not in job.written])


def reserve_decoded(depot: EngineDepot, job: Job, whole: list[bytes], start: int, page_tokens: int) -> None:
    """Becomes the writer of pages that this step fills. `start` is the step's first token. Raises ArenaFullError."""
    first = start // page_tokens if job.decoded is None else job.decoded
    job.decoded = max(first, len(whole))
    _reserve(depot, job, [Candidate(i, whole[i], PageKind.PREFIX) for i in range(first, len(whole))])


def due_copies(job: Job, table: list[int], end: int, page_tokens: int) -> list[PageCopy]:
    """Copies of reserved pages whose tokens are all computed when the step that ends at token `end` is done."""
    last = job.pages.prompt.length if job.publish else end
    due = [index for index in job.writes if min((index + 1) * page_tokens, last) <= end]
    return [PageCopy(job.write_owner, *_pop(job, index, table)) for index in due]


def block_to_zero(job: Job, table: list[int], start: int, end: int, page_tokens: int) -> int | None:
    """The block that the prompt fills partly, when the step from token `start` to `end` writes its first token."""
    tail, inside = divmod(job.pages.prompt.length, page_tokens)
    return table[tail] if inside and start <= tail * page_tokens < end else None


def _prompt(job: Job) -> list[Candidate]:
    prompt = job.pages.prompt
    pages = [Candidate(index, name, PageKind.PREFIX) for index, name in enumerate(prompt.full)]
    return pages if prompt.tail is None else [*pages, Candidate(len(pages), prompt.tail, PageKind.TRANSFER)]


def _reserve(depot: EngineDepot, job: Job, pages: list[Candidate]) -> None:
    if not pages:
        return
    offsets = depot.reserve(job.write_owner, [item.name for item in pages], [item.kind for item in pages])
    for item, offset in zip(pages, offsets, strict=True):
        if offset is not None:
            job.writes[item.page] = Write(item.name, offset)
            job.written.add(item.page)


def _pop(job: Job, index: int, table: list[int]) -> tuple[bytes, int, int]:
    write = job.writes.pop(index)
    return write.name, table[index], write.offset
