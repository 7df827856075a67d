"""The KV connector that vLLM loads: `--kv-transfer-config '{"kv_connector": "PdrelayConnector", ...}'`.

One behaviour for every role. Pages are named by content: an engine loads what its depot has and its own cache lacks,
copies out what it was asked to publish and the depot lacks, and tells the depot what its own cache holds.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from pdrelay.engine.vllm import private_api, settings
from pdrelay.engine.vllm.connector_scheduler import SchedulerSide
from pdrelay.engine.vllm.connector_worker import WorkerSide
from pdrelay.engine.vllm.contract import plan_of
from pdrelay.engine.vllm.depot_connection import DepotConnection
from pdrelay.engine.vllm.metadata import StepOrders

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PdrelayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's classes are untyped here
    """Delegates to `SchedulerSide` or `WorkerSide`; vLLM makes one object of each role, in processes of their own."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        private_api.check()
        super().__init__(vllm_config, role, kv_cache_config)
        from pdrelay.depot.engine_client import connect_engine

        config = settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        plan = plan_of(vllm_config, kv_cache_config, config)
        self.contract = plan.contract
        self._tables = tuple(range(len(kv_cache_config.kv_cache_groups)))
        connect = partial(connect_engine, config.depot_socket, config.instance, self.contract)
        if role is KVConnectorRole.SCHEDULER:
            caches = bool(vllm_config.cache_config.enable_prefix_caching)
            self.scheduler_side = SchedulerSide(config, DepotConnection(connect), plan, caches=caches)
        else:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
            self.worker_side = WorkerSide(connect, plan, rank, ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        """Pages are copied out in the step that computes them; nothing is pending when a request is preempted."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """The local prefix is what full attention has; windows and states come from the depot."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003 - vLLM's signature
        """Layer hooks do not run inside full CUDA graphs."""
        return True

    # Scheduler side

    def on_new_request(self, request: Request) -> None:
        """See `SchedulerSide.on_new_request`."""
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.matched_tokens`."""
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load writes blocks of every table: none may be zeroed under it."""
        return self._tables

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `SchedulerSide.after_alloc`."""
        self.scheduler_side.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `SchedulerSide.step_orders`."""
        return self.scheduler_side.step_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `SchedulerSide.worker_output`."""
        self.scheduler_side.worker_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: their pages are copied out already."""
        return False, self.scheduler_side.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return False, self.scheduler_side.finished(request)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `WorkerSide.register`."""
        self.worker_side.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before every forward pass; the only hook that always is."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads start at the step's end, in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All loads are asynchronous: a request is scheduled when its load is done."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See `WorkerSide.save_layer`."""
        self.worker_side.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """See `WorkerSide.end_step`."""
        self.worker_side.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerSide.take_results`."""
        return self.worker_side.take_results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `WorkerSide.take_news`."""
        return self.worker_side.take_news()

    def shutdown(self) -> None:
        """Ends the connection to the depot."""
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler_side.close()
        else:
            self.worker_side.close()
