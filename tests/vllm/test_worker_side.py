"""The connector beside the model, on plain tensors and the in-memory depot."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pdrelay.depot.base import Leased, PageKind
from pdrelay.depot.memory import MemoryDepot
from pdrelay.engine.vllm.groups import EngineGroup, LayerOf, Plan
from pdrelay.engine.vllm.settings import Settings
from pdrelay.errors import ConfigError
from pdrelay.kv.contract import KVContract, KVGroup

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from vllm.v1.outputs import KVConnectorOutput

    from pdrelay.engine.vllm.connector_scheduler import SchedulerSide
    from pdrelay.engine.vllm.connector_worker import WorkerSide
    from pdrelay.engine.vllm.depot_connection import DepotConnection
    from pdrelay.engine.vllm.jobs import MAX_SPOILED, PUBLISH
    from pdrelay.engine.vllm.metadata import Load, News, PageCopy, PageLoad, StepOrders

pytestmark = pytest.mark.vllm

LAYERS = 3
CONTRACT = KVContract(
    model="m", revision="", page_tokens=16, block_tokens=16,
    groups=(KVGroup(layers=LAYERS, heads=2, head_size=4, dtype="float32", part_bytes=1024, codec="test"),),
)  # fmt: skip
PLAN = Plan(
    CONTRACT,
    (
        EngineGroup(
            layers=tuple(LayerOf(f"model.layers.{i}.attn", 0) for i in range(LAYERS)),
            block_tokens=16, block_bytes=1024, ranks=1, copies=1,
        ),
    ),
)  # fmt: skip
PAGE = b"p" * 32


@pytest.fixture
def depot() -> MemoryDepot:
    return MemoryDepot(capacity=8 * CONTRACT.page_bytes)


@pytest.fixture
def caches() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"model.layers.{i}.attn": torch.rand((6, 2, 16, 8), generator=generator) for i in range(LAYERS)}


@pytest.fixture
def worker(depot: MemoryDepot, caches: dict[str, torch.Tensor]) -> Iterator[WorkerSide]:
    side = WorkerSide(lambda: depot.engine("e", CONTRACT), PLAN)
    side.register(caches)
    yield side
    side.close()


def _step(worker: WorkerSide, orders: StepOrders) -> None:
    worker.begin_step(orders)
    for layer in range(LAYERS):
        worker.save_layer(f"model.layers.{layer}.attn")
    worker.end_step()


def _results(worker: WorkerSide, request: str) -> tuple[bool, bool]:
    deadline = time.monotonic() + 5
    while True:
        results = worker.take_results()
        if request in results.finished_recving:
            return True, request in results.failed_recving
        assert time.monotonic() < deadline


def test_a_page_goes_out_and_comes_back(
    depot: MemoryDepot, worker: WorkerSide, caches: dict[str, torch.Tensor]
) -> None:
    engine = depot.engine("e", CONTRACT)
    (offset,) = engine.reserve("w", [PAGE], [PageKind.PREFIX])
    assert offset is not None
    _step(worker, StepOrders(epoch=depot.hub.epoch, copies=[PageCopy("w", PAGE, 0, ((2,),), offset)], finished=["w"]))
    (page,) = engine.lease("r", [PAGE]).pages
    assert page.offset == offset
    _step(worker, StepOrders(epoch=depot.hub.epoch, zero=[(0, 2)], loads=[_load("request", page, 4)]))
    assert _results(worker, "request") == (True, False)
    for index in range(LAYERS):
        cache = caches[f"model.layers.{index}.attn"]
        assert not cache[2].any()
        assert cache[4].any()
        assert bytes(depot.arena[offset + index * 1024 :][:1024]) == cache[4].numpy().tobytes()


def test_a_load_that_fails_is_reported_all_the_same(worker: WorkerSide, depot: MemoryDepot) -> None:
    _step(worker, StepOrders(epoch=depot.hub.epoch, loads=[_load("outside", Leased(len(depot.arena), b""), 1)]))
    assert _results(worker, "outside") == (True, True)
    _step(worker, StepOrders())
    depot.die()
    _step(worker, StepOrders(epoch="next", loads=[_load("no depot", Leased(0, b""), 1)]))
    assert _results(worker, "no depot") == (True, True)


def test_a_cache_in_pieces_is_refused(depot: MemoryDepot, caches: dict[str, torch.Tensor]) -> None:
    side = WorkerSide(lambda: depot.engine("e", CONTRACT), PLAN)
    pieces = {name: cache.transpose(1, 2) for name, cache in caches.items()}
    with pytest.raises(ConfigError, match=r"KV cache of model\.layers\.0\.attn"):
        side.register(pieces)
    with pytest.raises(ConfigError, match=r"found none of model\.layers\.2\.attn, expected 3 layers"):
        side.register(dict(list(caches.items())[:2]))
    side.close()


def test_after_a_failed_load_the_depot_is_asked_again_only_after_a_preemption(
    depot: MemoryDepot, worker: WorkerSide
) -> None:
    side, request = _scheduler(depot), _request()
    side.on_new_request(request)
    _publish(side, depot, worker)
    assert side.matched_tokens(request, 0) == (32, True)
    assert side.matched_tokens(request, 16) == (16, True)
    assert side.matched_tokens(request, 0) == (32, True)
    side.after_alloc(request, _blocks(1, 2, 3), 32)
    side.worker_output(SimpleNamespace(finished_recving={"r"}, failed_recving={"r"}))
    assert depot.hub.stats().leases == 0
    assert side.matched_tokens(request, 0) == (0, False)
    request.num_preemptions = 1
    assert side.matched_tokens(request, 0) == (32, True)
    side.finished(request)
    assert depot.hub.stats().leases == 0
    side.close()


def test_a_depot_restarted_behind_the_schedulers_back_is_not_written_to(depot: MemoryDepot, worker: WorkerSide) -> None:
    (offset,) = depot.engine("e", CONTRACT).reserve("w", [PAGE], [PageKind.PREFIX])
    assert offset is not None
    _step(
        worker,
        StepOrders(
            epoch="former", copies=[PageCopy("w", PAGE, 0, ((2,),), offset)], loads=[_load("r", Leased(offset, b""), 4)]
        ),
    )
    assert not any(depot.arena)
    assert _results(worker, "r") == (True, True)
    assert worker.take_news() == News({"former"})
    assert worker.take_news() is None


def test_the_scheduler_hears_of_a_loss_before_it_ends_the_requests_of_the_step(depot: MemoryDepot) -> None:
    side = _scheduler(depot)
    request = _request(kv_transfer_params={PUBLISH: True})
    side.on_new_request(request)
    side.matched_tokens(request, 0)
    assert depot.hub.stats().reserved == 3
    side.before_output(KVConnectorOutput(kv_connector_worker_meta=News({depot.hub.epoch})))
    assert depot.hub.stats().reserved == 0, "others may write its pages"
    told = side.finished(request)
    assert told is not None
    assert "lost" in told["pdrelay"]["error"]
    side.close()


def test_a_load_whose_lease_ended_under_way_counts_as_failed(depot: MemoryDepot, worker: WorkerSide) -> None:
    side = _scheduler(depot)
    request = _request()
    side.on_new_request(request)
    _publish(side, depot, worker)
    assert side.matched_tokens(request, 0) == (32, True)
    side.after_alloc(request, _blocks(1, 2, 3), 32)
    side.before_output(KVConnectorOutput(kv_connector_worker_meta=News({depot.hub.epoch})))
    output = KVConnectorOutput(finished_recving={"r"})
    side.before_output(output)
    assert output.failed_recving == {"r"}
    side.worker_output(output)
    side.finished(request)
    side.close()


def test_a_page_that_became_corrupt_is_not_loaded_and_the_rest_is_asked_for_again(
    depot: MemoryDepot, worker: WorkerSide
) -> None:
    side, request = _scheduler(depot), _request()
    side.on_new_request(request)
    _publish(side, depot, worker)
    names = side._jobs["r"].pages.prompt.full
    for failures in range(1, MAX_SPOILED + 2):
        assert side.matched_tokens(request, 0) == (32, True)
        side.after_alloc(request, _blocks(1, 2, 3), 32)
        orders = StepOrders(epoch=depot.hub.epoch, loads=side._orders.loads)
        side._orders = StepOrders()
        depot.arena[orders.loads[0].pages[1].offset + 1024] ^= 1
        _step(worker, orders)
        assert _results(worker, "r") == (True, True)
        output = KVConnectorOutput(
            finished_recving={"r"}, failed_recving={"r"}, kv_connector_worker_meta=worker.take_news()
        )
        side.before_output(output)
        side.worker_output(output)
        stats = depot.hub.stats()
        assert (stats.leases, stats.corrupt_pages, depot.hub.index.match(names)) == (0, failures, 1)
        if failures <= MAX_SPOILED:
            assert side.matched_tokens(request, 0) == (16, True)
            side._end_lease(side._jobs["r"])
        _publish(side, depot, worker)
    assert side.matched_tokens(request, 0) == (0, False), "memory that keeps spoiling pages is not asked for ever"
    side.finished(request)
    side.close()


def _load(request: str, page: Leased, block: int) -> Load:
    return Load(request, "r", [PageLoad(PAGE, 0, page.offset, ((block,),), page.checksums)])


def _scheduler(depot: MemoryDepot) -> SchedulerSide:
    settings = Settings(instance="e", depot_socket="", model="m")
    return SchedulerSide(settings, DepotConnection(lambda: depot.engine("e", CONTRACT)), PLAN)


def _blocks(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(blocks=([SimpleNamespace(block_id=block, block_hash=None) for block in ids],))


def _request(**changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "request_id": "r", "prompt_token_ids": list(range(40)), "all_token_ids": list(range(40)), "num_tokens": 40,
        "cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None, "kv_transfer_params": None,
        "skip_reading_prefix_cache": False, "num_preemptions": 0, "num_computed_tokens": 0,
        "is_finished": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def _publish(side: SchedulerSide, depot: MemoryDepot, worker: WorkerSide) -> None:
    """The two whole pages of the prompt come to be in the depot."""
    names, engine = side._jobs["r"].pages.prompt.full, depot.engine("e", CONTRACT)
    for name, offset in zip(names, engine.reserve("w", names, [PageKind.PREFIX] * 2), strict=True):
        if offset is not None:
            _step(worker, StepOrders(epoch=depot.hub.epoch, copies=[PageCopy("w", name, 0, ((1,),), offset)]))
