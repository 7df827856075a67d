"""The connector's side in vLLM's scheduler: what to load, what to copy out, and what the engine's own cache holds.

INV-CONN-1: a request holds leases only until its load ended, reservations only until it ended.
INV-CONN-2: a request that waits for room in the arena holds nothing there.
INV-CONN-3: vLLM loads exactly the tokens that the lease covers.
INV-CONN-4: a load counts only if its lease lasted until it was reported.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pdrelay.depot.base import EngineDepot
from pdrelay.engine.vllm import publishing
from pdrelay.engine.vllm.depot_connection import DepotConnection
from pdrelay.engine.vllm.groups import NULL_BLOCK, Plan, Tables
from pdrelay.engine.vllm.held import HeldBlocks
from pdrelay.engine.vllm.jobs import PUBLISH, Job, Lease, report
from pdrelay.engine.vllm.loading import take_lease
from pdrelay.engine.vllm.metadata import Load, News, PageLoad, StepOrders
from pdrelay.engine.vllm.pages import Naming, RequestPages
from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ArenaFullError, DepotError, DepotUnavailableError
from pdrelay.kv.demand import grows, published_tokens
from pdrelay.kv.names import Item, Scope

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class SchedulerSide:
    """All calls come from the engine core's thread. No call raises because of the depot."""

    def __init__(self, settings: Settings, link: DepotConnection, plan: Plan, *, caches: bool = True) -> None:
        """`caches`: the engine has a prefix cache of its own."""
        self._settings, self._link, self._plan = settings, link, plan
        self._groups, self._page_tokens = plan.contract.groups, plan.contract.page_tokens
        self._jobs: dict[str, Job] = {}
        self._orders = StepOrders()
        self._held = HeldBlocks(len(plan.groups[0].tables) * plan.blocks_per_page(0))
        self._reports_held = caches and grows(self._groups[0])  # of a window vLLM takes what is enough, or nothing
        self._key: bytes | None = None
        self._generation = 0

    def on_new_request(self, request: Request) -> None:
        """A request was added."""
        self._depot()
        # Embeddings have no ids that could name them.
        if request.prompt_token_ids is None or request.prompt_embeds is not None or self._key is None:
            return
        lora = self._adapter(request)
        if lora is None:
            return
        scope = Scope(self._settings.model, self._settings.revision, lora, request.cache_salt or "")
        prompt = request.prompt_token_ids
        prompt = prompt[: published_tokens(len(prompt), self._groups)]
        items = [Item(item.mm_position.offset, item.identifier) for item in request.mm_features]
        pages = RequestPages(Naming(scope, self._key, self._page_tokens), prompt, items)
        owner = f"{self._settings.instance}/{request.request_id}"
        publish = PUBLISH in (request.kv_transfer_params or {})
        self._jobs[request.request_id] = Job(request, owner, publish, pages)

    def _adapter(self, request: Request) -> str | None:
        """What stands for the request's adapter in page names; None for one that was loaded behind our back."""
        if request.lora_request is None:
            return ""
        return self._settings.adapters.get(request.lora_request.lora_name)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Tokens that the depot has beyond the `local` ones, and whether there are any.

        None when the request must wait for room in the arena. May be asked any number of times.
        """
        depot, job = self._depot(), self._jobs.get(request.request_id)
        if job is None:
            return 0, False
        job.local = local
        if depot is None:
            job.fail("the depot of this host is not reachable")
            return 0, False
        if job.retry_at > time.monotonic():
            return None, False
        try:
            external = self._admit(depot, job)
        except DepotError as error:
            self._failed(job, error)
            return 0, False
        return external, bool(external)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The request's blocks were allocated; `external` tokens are to be loaded into them."""
        job = self._jobs.get(request.request_id)
        if job is None or job.loading:
            return
        # Blocks without hash are new, or not full yet.
        fresh = [[0 if block.block_hash else block.block_id for block in table] for table in blocks.blocks]
        job.seen, job.filled = [len(table) for table in fresh], 0
        self._held.hand_out(block for table in fresh for block in table)
        job.count(external)
        lease = job.lease
        if lease is None:
            return
        if not external:  # the request may not read a cache, or has all it needs
            self._end_lease(job)
            return
        assert self._told(job, lease) == job.local + external, "INV-CONN-3: vLLM loads what the lease covers"
        self._orders.loads.append(self._load(job, lease, fresh))
        job.loading = True

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where the step from token `start` must end, at most `end`: a state is published as it is between tokens."""
        job = self._jobs.get(request.request_id)
        stops = job is not None and job.publish and any(group.is_state for group in self._plan.groups)
        return job.pages.prompt.length if job and stops and start < job.pages.prompt.length < end else end

    def step_orders(self, output: SchedulerOutput) -> StepOrders:
        """The orders for the step that was just scheduled."""
        depot, tables = self._depot(), output.kv_connector_block_state
        assert tables is not None
        for request_id, tokens in output.num_scheduled_tokens.items():
            job = self._jobs.get(request_id)
            if job is not None:
                blocks = tables.get_block_ids(request_id)
                assert blocks is not None
                start = job.request.num_computed_tokens
                self._step(depot, job, blocks, start, start + tokens)
        self._report_held()
        orders, self._orders = self._orders, StepOrders()
        depot = self._depot()
        orders.epoch = depot.epoch if depot is not None else ""
        return orders

    def before_output(self, output: KVConnectorOutput) -> None:
        """A step ended, and vLLM has not looked at its output yet: requests that end with it must be told of losses."""
        news, depot = output.kv_connector_worker_meta, self._depot()
        if isinstance(news, News):
            if depot is not None and depot.epoch in news.lost:
                # Once the connection closes, the depot drops all reservations: others can write those pages.
                self._lost(DepotUnavailableError("a worker lost its connection"))
            for request_id in news.spoiled:
                if (job := self._jobs.get(request_id)) is not None:
                    job.spoiled += 1
            for owner in news.finished:
                self._release(owner)
        void = {job.request.request_id for job in self._jobs.values() if job.void}
        output.failed_recving = output.failed_recving | (void & (output.finished_recving or set()))

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Loads ended, well or not."""
        for request_id in output.finished_recving or ():
            job = self._jobs.get(request_id)
            if job is None:
                continue
            job.loading = job.void = False
            if request_id in output.failed_recving:
                job.load_failed()
            self._end_lease(job)
            if job.request.is_finished():
                del self._jobs[request_id]

    def finished(self, request: Request) -> dict[str, object] | None:
        """The request ended; what to tell with its last output."""
        job = self._jobs.get(request.request_id)
        if job is None:  # the depot was never reached, or the request has content that we cannot name
            wanted = PUBLISH in (request.kv_transfer_params or {})
            return report(error="the depot of this host is not reachable") if wanted else None
        if any(write.required for write in job.writes):
            job.fail("the request ended before its prompt was computed")
        self._confirm(job)
        self._report_use(job)
        if job.written:
            # A worker ends the reservations: it knows when copies of steps still in flight are done.
            self._orders.finished.append(job.write_owner)
        if not job.loading:
            self._end_lease(job)
            del self._jobs[request.request_id]
        return None if job.told else job.report()

    def take_report(self, request_id: str) -> dict[str, object] | None:
        """What to tell with the first output of a request that goes on."""
        job = self._jobs.get(request_id)
        return job.report() if job is not None and not job.publish and not job.told else None

    def prefix_cache_reset(self) -> None:
        """The engine's own prefix cache was emptied."""
        self._held.clear()

    def close(self) -> None:
        """The engine ends."""
        self._link.close()

    # Loading

    def _admit(self, depot: EngineDepot, job: Job) -> int | None:
        external = self._lease(depot, job)
        if external is None or not job.publish or job.admitted or job.error:
            return external
        try:
            publishing.reserve_prompt(depot, job, self._plan)
        except ArenaFullError as error:
            if error.hopeless:
                job.fail(f"the prompt's KV does not fit into the depot: {error}")
                return external
            self._end_lease(job)  # INV-CONN-2: or two requests could wait for each other
            job.try_later(time.monotonic())
            return None
        return external

    def _lease(self, depot: EngineDepot, job: Job) -> int | None:
        request, first = job.request, job.local // self._page_tokens
        if request.skip_reading_prefix_cache or job.failed_at == request.num_preemptions:
            return 0
        if job.lease is None or job.lease.first != first:
            self._end_lease(job)
            job.lease, coming = take_lease(depot, job, self._groups, first)
            if coming and job.waits_for_disk(time.monotonic()):
                self._end_lease(job)  # INV-CONN-2
                return None
        return self._told(job, job.lease) - job.local if job.lease is not None else 0

    def _told(self, job: Job, lease: Lease) -> int:
        """The tokens of `lease` as told to vLLM. Where it has all, vLLM computes the last one again; a window must
        then reach one token further back, or vLLM has dropped that token's block."""
        windows = any(group.kind == "sliding_window" for group in self._groups)
        return lease.tokens - (windows and lease.tokens == job.request.num_tokens)

    def _load(self, job: Job, lease: Lease, tables: Tables) -> Load:
        """Pages go into blocks that are new; what the local prefix brought stays as it is."""
        loads = []
        for page, leased in lease.pages:
            group = self._plan.groups[page.group]
            blocks = group.blocks(tables, page.number, self._page_tokens, lease.tokens)
            if any(block != NULL_BLOCK for table in blocks for block in table):
                loads.append(PageLoad(page.name, page.group, leased.offset, blocks, leased.checksums))
        return Load(job.request.request_id, job.load_owner, loads)

    def _end_lease(self, job: Job) -> None:
        if job.lease is not None:
            job.lease = None
            self._release(job.load_owner)

    def _release(self, owner: str) -> None:
        if (depot := self._depot()) is not None:
            try:
                depot.release(owner)
            except DepotError as error:
                self._lost(error)

    # Publishing

    def _step(self, depot: EngineDepot | None, job: Job, tables: Tables, start: int, end: int) -> None:
        whole = job.pages.full(job.request.all_token_ids, end)
        self._watch_blocks(job, tables, whole)
        if depot is None:
            return
        try:
            self._reserve(depot, job, whole, start, end)
        except DepotError as error:
            self._failed(job, error)
        if job.publish:
            self._orders.zero += publishing.blocks_to_zero(job, self._plan, tables, start, end)
        self._orders.copies += publishing.due_copies(job, self._plan, tables, start, end)

    def _reserve(self, depot: EngineDepot, job: Job, whole: list[bytes], start: int, end: int) -> None:
        if job.publish:
            publishing.reserve_edge_state(depot, job, self._plan, end)
            if end >= job.pages.prompt.length:
                publishing.adopt_orphans(depot, job, self._plan)
        elif self._settings.publish_decode:
            publishing.reserve_decoded(depot, job, self._plan, whole, start, end)

    def _confirm(self, job: Job) -> None:
        """A worker publishes without waiting for an answer: looks whether the depot is still there."""
        depot = self._depot()
        if not job.publish or job.error:
            return
        if depot is None:
            job.fail("the depot of this host was lost")
            return
        try:
            depot.match([])
        except DepotError as error:
            self._failed(job, error)

    def _report_use(self, job: Job) -> None:
        if job.counted and (depot := self._depot()) is not None:
            try:
                depot.report_use(job.use())
            except DepotError as error:
                self._lost(error)

    # The engine's own cache

    def _watch_blocks(self, job: Job, tables: Tables, whole: list[bytes]) -> None:
        for number, table in enumerate(tables):
            if job.seen[number] < len(table):
                self._held.hand_out(table[job.seen[number] :])
                job.seen[number] = len(table)
        if self._reports_held:
            for index in range(job.filled, len(whole)):
                blocks = self._plan.groups[0].blocks(tables, index, self._page_tokens, 0)
                self._held.fill([block for table in blocks for block in table], whole[index])
        job.filled = max(job.filled, len(whole))

    def _report_held(self) -> None:
        depot = self._depot()
        if depot is None:
            return
        changes = self._held.take_changes()
        if changes.added or changes.removed:
            try:
                depot.report_held(changes.added, changes.removed)
            except DepotError as error:
                self._lost(error)

    # The depot

    def _depot(self) -> EngineDepot | None:
        depot = self._link.get()
        if depot is not None and self._link.generation != self._generation:
            self._generation, self._key = self._link.generation, depot.fleet_key
            self._forget_depot("the depot of this host was restarted")
        return depot

    def _failed(self, job: Job, error: DepotError) -> None:
        if isinstance(error, ArenaFullError):
            job.fail(str(error))
            _log.debug("pages of %s are not published: %s", job.owner, error)
        else:
            job.fail("the depot of this host was lost")
            self._lost(error)

    def _lost(self, error: DepotError) -> None:
        self._link.lost(error)
        self._forget_depot("the depot of this host was lost")

    def _forget_depot(self, reason: str) -> None:
        self._held.forget_reports()
        self._orders.copies.clear()
        for job in self._jobs.values():
            if job.written:  # a worker whose connection lives on says when it is through with them
                self._orders.finished.append(job.write_owner)
            if job.admitted:
                job.fail(reason)
            job.forget_depot()
