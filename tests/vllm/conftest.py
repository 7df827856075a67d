"""Two real vLLM engines on one depot, started once for all tests that are marked `vllm`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from adapter import make_adapter
from engines import DepotThread, Engine, started
from real import with_tools

from pdrelay.cli.local.model import ensure_checkpoint

PAGE_BYTES = 30 * 3 * 64 * 2 * 32 * 4
"""SmolLM2-135M in float32, 32 tokens a page."""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other on a busy machine take forever
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(240))
            # torch and vLLM warn about themselves, at import and later.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning:torch"))
            # vLLM leaves a ZeroMQ context of its own to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with markers of tools and reasoning."""
    os.environ.update(ENVIRONMENT)
    return with_tools(ensure_checkpoint(), tmp_path_factory.mktemp("tools") / "smollm2")


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A LoRA adapter, which both engines serve as `engines.ADAPTER`."""
    return make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint)


@pytest.fixture(scope="session")
def depot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DepotThread]:
    depot = DepotThread(tmp_path_factory.mktemp("depot") / "d.sock", 100 * PAGE_BYTES)
    yield depot
    depot.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(depot: DepotThread, checkpoint: Path, adapter: Path) -> AsyncIterator[tuple[Engine, Engine]]:
    """Prefill and decode."""
    async with started(
        partial(
            Engine, "p-0", depot, adapter, model=str(checkpoint), max_num_batched_tokens=64,
            kv_cache_memory_bytes=200 * PAGE_BYTES,
        ),
        partial(
            Engine, "d-0", depot, adapter, model=str(checkpoint), max_num_batched_tokens=1024, publish_decode=True,
            kv_cache_memory_bytes=48 * PAGE_BYTES, reasoning_parser="deepseek_r1",
        ),
    ) as (prefill, decode):  # fmt: skip
        yield prefill, decode


@pytest.fixture(scope="session")
def prefill(engines: tuple[Engine, Engine]) -> Engine:
    """Prefills in chunks of at most 64 tokens."""
    return engines[0]


@pytest.fixture(scope="session")
def decode(engines: tuple[Engine, Engine]) -> Engine:
    """Publishes what it decodes, reasons, and has so few blocks that two long requests crowd each other out."""
    return engines[1]
