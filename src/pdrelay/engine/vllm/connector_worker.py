"""The connector's side beside the model: copies pages between engine blocks and the depot's arena.

INV-COPY-1: a part's checksum is taken from the arena after the copy, and the part is published after that.
INV-COPY-2: every load that was ordered is reported as received exactly once, failed or not.
INV-COPY-3: offsets are used only in the arena that they were given for.
INV-COPY-4: a load with a part whose bytes do not fit its checksum fails, and the depot drops the page before that.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.models.utils import extract_layer_index

from pdrelay.depot.base import EngineDepot, Part
from pdrelay.depot.checksums import checksum, unpack_checksums
from pdrelay.engine.vllm.metadata import Load, PageCopy, StepOrders, Troubles
from pdrelay.errors import ConfigError, ContractError, DepotError, DepotUnavailableError
from pdrelay.kv.contract import KVContract

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

_log = logging.getLogger(__name__)

LOAD_THREADS = 2


class WorkerSide:
    """Calls come from the worker's thread; loads run in threads of their own."""

    def __init__(self, connect: Callable[[], EngineDepot], contract: KVContract) -> None:
        self._connect, self._layout = connect, contract.layouts[0]
        self._epoch = ""  # of the depot that it is connected to
        self._troubles = Troubles()
        self._depot: EngineDepot | None = None
        self._arena: torch.Tensor | None = None
        self._layers: dict[str, tuple[int, torch.Tensor]] = {}
        self._orders = StepOrders()
        self._loaders = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="pdrelay-load")
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the KV cache, one `[blocks, ...]` tensor a layer. Raises ConfigError when a page is in pieces."""
        names = sorted(kv_caches, key=extract_layer_index)
        if len(names) != self._layout.parts:
            raise ConfigError(f"KV cache: found {len(names)} layers, expected {self._layout.parts}")
        self._layers = {name: (index, self._as_parts(name, kv_caches[name])) for index, name in enumerate(names)}

    def begin_step(self, orders: StepOrders) -> None:
        """Before the forward pass."""
        self._orders = orders
        self._follow(orders.epoch)
        for block in orders.zero:
            for _, parts in self._layers.values():
                parts[block].zero_()

    def save_layer(self, layer_name: str) -> None:
        """The layer's KV of this step is computed."""
        if not self._orders.copies or self._depot is None:
            return
        layer, parts = self._layers[layer_name]
        published: dict[str, list[Part]] = defaultdict(list)
        for copy in self._orders.copies:
            published[copy.owner].append(self._copy_out(copy, layer, parts))
        try:
            for owner, done in published.items():
                self._depot.publish(owner, done)
        except DepotError as error:
            self._lose(error)

    def end_step(self) -> None:
        """After the forward pass, in steps without one too."""
        for load in self._orders.loads:
            self._loaders.submit(self._load, load, self._depot, self._arena)
        self._release(self._orders.released)
        self._orders = StepOrders()

    def take_results(self) -> KVConnectorTransferResults:
        """Loads that ended since the last call."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def take_troubles(self) -> Troubles | None:
        """What went wrong since the last call. Call after `take_results`, in the same step."""
        with self._lock:
            troubles, self._troubles = self._troubles, Troubles()
        return troubles or None

    def close(self) -> None:
        """The worker ends."""
        self._loaders.shutdown()
        self._drop()

    def _as_parts(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        """The layer's cache as bytes, `[blocks, part_bytes]`; a view."""
        if not cache[0].is_contiguous() or cache[0].nbytes != self._layout.part_bytes:
            raise ConfigError(
                f"KV cache of {name}: found {cache[0].nbytes} bytes a block with strides {cache.stride()}, "
                f"expected {self._layout.part_bytes} in one run"
            )
        raw = cache.view(torch.uint8)
        return raw.as_strided((len(cache), self._layout.part_bytes), (raw.stride(0), 1), raw.storage_offset())

    def _release(self, owners: list[str]) -> None:
        if self._depot is None:
            return
        try:
            for owner in owners:
                self._depot.release(owner)
        except DepotError as error:
            self._lose(error)

    def _copy_out(self, copy: PageCopy, layer: int, parts: torch.Tensor) -> Part:
        assert self._arena is not None
        assert self._depot is not None
        size = self._layout.part_bytes
        start = copy.offset + layer * size
        self._arena[start : start + size].copy_(parts[copy.block])
        return Part(copy.name, layer, checksum(self._depot.arena[start : start + size]))

    def _load(self, load: Load, depot: EngineDepot | None, arena: torch.Tensor | None) -> None:
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
                self._troubles.spoiled.add(load.request_id)

    def _copy_in(self, load: Load, arena: torch.Tensor | None) -> list[bytes]:
        """Copies every page; the names of those with a part that does not fit its checksum."""
        if arena is None:
            raise DepotError("the depot was lost before the load began")
        size, page = self._layout.part_bytes, self._layout.page_bytes
        for item in load.pages:
            if item.offset < 0 or item.offset + page > len(arena):
                raise DepotError(f"page at {item.offset} with {page} bytes is outside the arena of {len(arena)}")
        expected = [unpack_checksums(item.checksums) for item in load.pages]
        corrupt: dict[bytes, None] = {}
        for layer, parts in self._layers.values():
            for item, checksums in zip(load.pages, expected, strict=True):
                start = item.offset + layer * size
                source = arena[start : start + size]
                if checksum(source.numpy()) != checksums[layer]:
                    corrupt[item.name] = None
                parts[item.block].copy_(source)
        if parts.is_cuda:
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
        # Read-only mappings cannot be tensors without a warning; the arena is writable by contract.
        self._arena = torch.frombuffer(self._depot.arena, dtype=torch.uint8)

    def _lose(self, error: DepotError | ContractError) -> None:
        _log.error("depot lost: %s", error)
        with self._lock:
            self._troubles.lost.add(self._epoch)
        self._drop()

    def _drop(self) -> None:
        depot, self._depot, self._arena, self._epoch = self._depot, None, None, ""
        if depot is not None:
            depot.close()
