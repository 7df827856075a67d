"""What the connector's scheduler side knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdrelay.depot.base import Leased, Use
from pdrelay.engine.vllm.pages import RequestPages

if TYPE_CHECKING:
    from vllm.v1.request import Request

PUBLISH = "pdrelay_publish"
"""Key in a request's kv_transfer_params: publish its prompt's pages, tail included, or fail."""

REPORT = "pdrelay"
"""Key in an output's kv_transfer_params: what the connector did for the request."""

MAX_SPOILED = 3
"""A request whose loads met corrupt pages more often computes its prompt."""

RETRY_SECONDS = 0.01
"""Time between two tries of a request that waits for the arena or the disk."""

RECALL_SECONDS = 5.0
"""What has not come back from disk by then is computed."""


def report(cached: int = 0, loaded: int = 0, error: str = "") -> dict[str, object]:
    """The kv_transfer_params of an output that tells what was done for its request."""
    return {REPORT: {"cached": cached, "loaded": loaded, "error": error}}


class PageOf(NamedTuple):
    """A page of one KV group."""

    group: int
    number: int  # of the page, from the request's start
    name: bytes


class Lease(NamedTuple):
    """Complete pages at the depot that, with the local prefix, are enough to go on after `tokens` tokens."""

    first: int  # whole pages of the local prefix
    pages: list[tuple[PageOf, Leased]]
    tokens: int


class Write(NamedTuple):
    """A page that this request must write."""

    page: PageOf
    tokens: int  # of the request, when the page ends
    required: bool  # the request fails without it
    offset: int


@dataclass(slots=True)
class Job:
    """State of one request. Page indices count from the request's start."""

    request: Request
    owner: str
    publish: bool
    pages: RequestPages
    local: int = 0  # tokens of the local prefix hit at the last look
    # loading
    lease: Lease | None = None
    loading: bool = False
    recall_until: float | None = None  # it waits until then for pages that are on disk
    void: bool = False  # its lease ended while it loaded: the pages may have changed under the copy
    failed_at: int = -1  # preemptions so far when a load failed: no other try before the next preemption
    losses: int = 0  # of the connection to the depot
    spoiled: int = 0  # loads that met a corrupt page
    # publishing
    admitted: bool = False  # the prompt's pages are reserved
    checked: bool = False  # looked for pages whose other writer died
    retry_at: float = 0.0  # time of the next try to lease and reserve
    writes: list[Write] = field(default_factory=list)  # reserved and not yet copied
    written: set[bytes] = field(default_factory=set)  # ever reserved
    decoded: int | None = None  # whole pages before this one are not ours to publish, or were looked at
    # the engine's own cache
    seen: list[int] = field(default_factory=list)  # blocks that were looked at, by table
    filled: int = 0  # whole pages that were looked at
    # the report
    counted: bool = False
    cached: int = 0  # tokens found in the engine's own cache
    loaded: int = 0  # tokens loaded from the depot
    from_disk: int = 0  # ... of pages that it had brought back from disk
    reloaded: int = 0  # tokens loaded again after preemptions
    error: str = ""  # why its pages are not all published
    told: bool = False

    @property
    def load_owner(self) -> str:
        """Owner of the leases."""
        return f"{self.owner}/load"

    @property
    def write_owner(self) -> str:
        """Owner of the reservations. After a loss of the depot it is another: the former's writes may be under way."""
        return f"{self.owner}/write{self.losses or ''}"

    def count(self, external: int) -> None:
        """The request has its first blocks, and `external` tokens will be loaded."""
        if not self.counted:
            self.counted, self.cached, self.loaded = True, self.local, external
            leased = self.lease.pages if self.lease is not None and external else []
            whole = sum(page.from_disk for at, page in leased if at.group == 0)
            self.from_disk = whole * self.pages.prompt.page_tokens
        elif self.request.num_preemptions:
            self.reloaded += external

    def use(self) -> Use:
        """Where the KV of its prompt came from."""
        prompt = self.pages.prompt.length
        own = min(self.cached, prompt)
        loaded = min(self.loaded, prompt - own)
        disk = min(self.from_disk, loaded)
        computed = prompt - own - loaded
        return Use(requests=1, own=own, arena=loaded - disk, disk=disk, computed=computed, reloaded=self.reloaded)

    def try_later(self, now: float) -> None:
        """The depot is asked again in a while."""
        self.retry_at = now + RETRY_SECONDS

    def waits_for_disk(self, now: float) -> bool:
        """Pages are on their way from disk: whether the request waits for them."""
        if self.recall_until is None:
            self.recall_until = now + RECALL_SECONDS
        self.try_later(now)
        return now < self.recall_until

    def load_failed(self) -> None:
        """Its load failed. Where the depot dropped a corrupt page it is asked again for what it has besides."""
        self.counted = False
        if not 0 < self.spoiled <= MAX_SPOILED:
            self.failed_at = self.request.num_preemptions

    def fail(self, reason: str) -> None:
        """Its pages cannot be published; the request goes on and tells so at its end."""
        if self.publish and not self.error:
            self.error = reason

    def report(self) -> dict[str, object]:
        """The kv_transfer_params of the output that tells what was done."""
        self.told = True
        return report(self.cached, self.loaded, self.error)

    def forget_depot(self) -> None:
        """Leases and reservations are void. A load that runs goes on (its bytes stay mapped), but counts as failed."""
        self.void = self.loading
        self.losses += 1
        self.lease = None
        self.admitted = False
        self.writes.clear()
        self.written.clear()
