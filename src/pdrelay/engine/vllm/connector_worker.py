"""The connector's side beside the model: copies pages between engine blocks and the depot's arena.

INV-COPY-1: a part's checksum is taken from the arena after the copy, and the part is published after that.
INV-COPY-2: every load that was ordered is reported as received exactly once, failed or not.
INV-COPY-3: offsets are used only in the arena that they were given for.
INV-COPY-4: a load with a part whose bytes do not fit its checksum fails, and the depot drops the page before that.
INV-COPY-5: a request's reservations end only when every rank's parts are published.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from pdrelay.depot.base import EngineDepot, Part
from pdrelay.depot.checksums import checksum, unpack_checksums
from pdrelay.engine.vllm.groups import NULL_BLOCK, Plan
from pdrelay.engine.vllm.layer_cache import Bytes, LayerCache, arena_bytes, in_memory, layer_caches
from pdrelay.engine.vllm.metadata import Load, News, PageCopy, PageLoad, StepOrders
from pdrelay.engine.vllm.pinning import pin, unpin
from pdrelay.errors import ContractError, DepotError, DepotUnavailableError

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

_log = logging.getLogger(__name__)

LOAD_THREADS = 2


class WorkerSide:
    """Calls come from the worker's thread; loads run in threads of their own."""

    def __init__(self, connect: Callable[[], EngineDepot], plan: Plan, rank: int = 0, ranks: int = 1) -> None:
        """`rank` of `ranks` tensor-parallel ones."""
        self._connect, self._plan, self._rank, self._alone = connect, plan, rank, ranks == 1
        self._epoch = ""  # of the depot that it is connected to
        self._news = News()
        self._depot: EngineDepot | None = None
        self._arena: Bytes = None
        self._device = torch.device("cpu")
        self._layers: dict[str, LayerCache] = {}
        self._states: list[LayerCache] = []
        self._orders = StepOrders()
        self._copies: dict[int, list[PageCopy]] = {}  # of this step, by group
        self._pinned = False
        self._loading: set[Future[None]] = set()
        self._loaders = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="pdrelay-load")
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the KV cache, one `[blocks, ...]` tensor a layer. Raises ConfigError when a page is in pieces."""
        self._layers = layer_caches(self._plan, self._rank, kv_caches)
        self._device = next(iter(kv_caches.values())).device
        self._states = [cache for cache in self._layers.values() if self._plan.groups[cache.group].is_state]

    def begin_step(self, orders: StepOrders) -> None:
        """Before the forward pass."""
        self._orders = orders
        self._follow(orders.epoch)
        self._copies = defaultdict(list)
        for copy in orders.copies:
            self._copies[copy.group].append(copy)
        for table, block in orders.zero:
            for cache in self._layers.values():
                if cache.table == table:
                    cache.shares[block] = 0

    def save_layer(self, layer_name: str) -> None:
        """The layer's KV of this step is computed."""
        cache = self._layers.get(layer_name)
        if cache is not None and cache.group in self._copies:
            self._save([cache])

    def end_step(self) -> None:
        """After the forward pass, in steps without one too."""
        if self._copies:  # vLLM calls no hook when a linear layer is done
            self._save([cache for cache in self._states if cache.group in self._copies])
        for load in self._orders.loads:
            self._loading.add(self._loaders.submit(self._load, load, self._depot, self._arena))
        self._loading = {load for load in self._loading if not load.done()}
        self._finish(self._orders.finished)
        self._orders = StepOrders()

    def take_results(self) -> KVConnectorTransferResults:
        """Loads that ended since the last call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def take_news(self) -> News | None:
        """What is to be told since the last call. Call after `take_results`, in the same step."""
        with self._lock:
            news, self._news = self._news, News()
        return news or None

    def close(self) -> None:
        """The worker ends."""
        self._loaders.shutdown()
        self._drop()

    def _save(self, caches: list[LayerCache]) -> None:
        if self._depot is None:
            return
        published: dict[str, list[Part]] = defaultdict(list)
        for cache in caches:
            if cache.writes:
                for copy in self._copies[cache.group]:
                    published[copy.owner] += self._copy_out(copy, cache)
        try:
            for owner, parts in published.items():
                self._depot.publish(owner, parts)
        except DepotError as error:
            self._lose(error)

    def _copy_out(self, copy: PageCopy, cache: LayerCache) -> list[Part]:
        assert self._depot is not None
        parts, size, stretch = [], cache.part_bytes, cache.shares.shape[2]
        for share in range(cache.shares.shape[1]):
            number = cache.first_part + share
            start = end = copy.offset + number * size
            for block in copy.blocks[cache.slot]:
                self._arena[end : end + stretch] = cache.shares[block, share]
                end += stretch
            if end < start + size:  # the prompt ends before the page's last block
                self._arena[end : start + size] = 0
            parts.append(Part(copy.name, number, checksum(self._depot.arena[start : start + size])))
        return parts

    def _finish(self, owners: list[str]) -> None:
        if self._depot is None or not owners:
            return
        try:
            if self._alone:
                for owner in owners:
                    self._depot.release(owner)
                return
            # Others may still be publishing: the scheduler ends the reservations when all ranks have told.
            self._depot.match([])  # the depot answers when it has read what was published before
        except DepotError as error:
            self._lose(error)
            return
        with self._lock:
            self._news.finished.update(owners)

    def _load(self, load: Load, depot: EngineDepot | None, arena: Bytes) -> None:
        failed, corrupt = True, list[bytes]()
        try:
            corrupt = self._copy_in(load, arena)
            if corrupt and depot is not None:
                _log.error("%d pages for %s are corrupt in the arena", len(corrupt), load.request_id)
                depot.corrupt(load.owner, corrupt)
            failed = bool(corrupt)
        except Exception:
            # Nobody awaits this thread, and a load that is never reported leaks the request's blocks.
            _log.exception("loading %s failed; its prompt is computed instead", load.request_id)
        with self._lock:
            self._received.add(load.request_id)
            if failed:
                self._failed.add(load.request_id)
            if corrupt:
                self._news.spoiled.add(load.request_id)

    def _copy_in(self, load: Load, arena: Bytes) -> list[bytes]:
        """Copies every page; the names of those with a part that does not fit its checksum."""
        if arena is None:
            raise DepotError("the depot was lost before the load began")
        layouts = self._plan.contract.layouts
        for item in load.pages:
            if item.offset < 0 or item.offset + layouts[item.group].page_bytes > len(arena):
                size = layouts[item.group].page_bytes
                raise DepotError(f"page at {item.offset} with {size} bytes is outside the arena of {len(arena)}")
        expected = [unpack_checksums(item.checksums) for item in load.pages]
        corrupt: dict[bytes, None] = {}
        for cache in self._layers.values():
            for item, checksums in zip(load.pages, expected, strict=True):
                if item.group == cache.group and not _copy_part_in(item, cache, arena, checksums):
                    corrupt[item.name] = None
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return list(corrupt)

    def _follow(self, epoch: str) -> None:
        """Connects to the depot that the scheduler's side is connected to."""
        if epoch in ("", self._epoch):
            return
        self._drop()
        self._epoch = epoch
        try:
            self._depot = self._connect()
            if self._depot.epoch != epoch:  # INV-COPY-3
                raise DepotUnavailableError("it was restarted once more")
        except (DepotError, ContractError) as error:
            self._lose(error)
            return
        self._arena = arena_bytes(self._depot.arena, self._device)
        if self._device.type == "cuda":
            self._pinned = pin(self._arena)

    def _lose(self, error: DepotError | ContractError) -> None:
        _log.error("depot lost: %s", error)
        with self._lock:
            self._news.lost.add(self._epoch)
        self._drop()

    def _drop(self) -> None:
        if self._pinned and self._arena is not None:
            wait(self._loading)
            unpin(self._arena)
            self._pinned = False
        depot, self._depot, self._arena, self._epoch = self._depot, None, None, ""
        if depot is not None:
            depot.close()


def _copy_part_in(item: PageLoad, cache: LayerCache, arena: Bytes, checksums: Sequence[int]) -> bool:
    """Copies a page's parts of one layer; False when one does not fit its checksum."""
    intact, size, stretch = True, cache.part_bytes, cache.shares.shape[2]
    for share in range(cache.shares.shape[1]):
        number = cache.first_part + share
        start = item.offset + number * size
        intact = intact and checksum(in_memory(arena[start : start + size])) == checksums[number]
        for block in item.blocks[cache.slot]:
            if block != NULL_BLOCK:
                cache.shares[block, share] = arena[start : start + stretch]
            start += stretch
    return intact
