"""Pages of several KV groups and ranks between engine blocks and the depot, on plain tensors."""

from __future__ import annotations

import time
import warnings
from itertools import count

import pytest

from pdrelay.depot.base import Leased, PageKind
from pdrelay.depot.memory import MemoryDepot
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import in_group

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from pdrelay.engine.vllm.connector_worker import WorkerSide
    from pdrelay.engine.vllm.groups import EngineGroup, LayerOf, PageBlocks, Plan
    from pdrelay.engine.vllm.metadata import Load, News, PageCopy, PageLoad, StepOrders

pytestmark = pytest.mark.vllm

NAME = b"n" * 32
HEADS, BLOCK, BLOCKS = 2, 16, 6
HEAD_BYTES = BLOCK * 8 * 4  # tokens, contents, float32
_numbers = count()


def plan(ranks: int, shards: int, pages_of: int = 1) -> Plan:
    """Two layers of full attention with a table each, one of MLA, one with a state."""
    shares = {"full_attention": ranks, "mla": 1, "linear_state": ranks}
    sizes = {"full_attention": HEADS * HEAD_BYTES, "mla": 640, "linear_state": 96 * ranks}  # of a block on all ranks
    layers = {"full_attention": [("layers.0", 0), ("layers.1", 1)], "mla": [("layers.2", 0)],
              "linear_state": [("layers.3", 2)]}  # fmt: skip
    kinds = [kind for kind in shares if kind != "linear_state" or ranks == shards]
    contract = KVContract(
        model="m", revision="", page_tokens=BLOCK * pages_of, block_tokens=BLOCK, shards=shards,
        groups=tuple(
            KVGroup(kind=kind, layers=len(layers[kind]), heads=1, head_size=8, dtype="float32", codec="test",
                    part_bytes=sizes[kind] * (1 if kind == "linear_state" else pages_of) // shards)
            for kind in kinds
        ),
    )  # fmt: skip
    groups = tuple(
        EngineGroup(
            layers=tuple(LayerOf(*layer) for layer in layers[kind]), block_tokens=BLOCK,
            block_bytes=sizes[kind] // shares[kind], ranks=ranks, copies=ranks // shares[kind],
            is_state=kind == "linear_state",
        )
        for kind in kinds
    )  # fmt: skip
    return Plan(contract, groups)


class Rank:
    """One worker with random caches, the same for all ranks where they keep the same."""

    def __init__(self, depot: MemoryDepot, plan: Plan, rank: int = 0, ranks: int = 1) -> None:
        self.plan = plan
        generator = torch.Generator().manual_seed(9)
        heads = torch.rand((2, BLOCKS, HEADS, BLOCK, 8), generator=generator)
        own = heads[:, :, rank * HEADS // ranks : (rank + 1) * HEADS // ranks]
        self.caches = {f"layers.{i}": own[i].contiguous() for i in range(2)}
        self.caches["layers.2"] = torch.rand((BLOCKS, 1, 1, 160), generator=generator)
        # A state's block is wider than the state.
        self.caches["layers.3"] = torch.rand((BLOCKS, 40), generator=generator)[:, :24].view(BLOCKS, 1, 1, 24) + rank
        self.side = WorkerSide(lambda: depot.engine("e", plan.contract), plan, rank, ranks)
        self.side.register(self.caches)

    def step(self, orders: StepOrders, *, layers: int = 3) -> None:
        self.side.begin_step(orders)
        for layer in range(layers):
            self.side.save_layer(f"layers.{layer}")
        self.side.end_step()

    def load(self, depot: MemoryDepot, page: Leased, group: int, blocks: PageBlocks) -> bool:
        """Whether it succeeded."""
        request, name = f"r{next(_numbers)}", in_group(NAME, group)
        orders = StepOrders(epoch=depot.hub.epoch)
        orders.loads.append(Load(request, "r", [PageLoad(name, group, page.offset, blocks, page.checksums)]))
        self.step(orders)
        deadline = time.monotonic() + 5
        while request not in (results := self.side.take_results()).finished_recving:
            assert time.monotonic() < deadline
        return request not in results.failed_recving


@pytest.fixture
def depot() -> MemoryDepot:
    return MemoryDepot(capacity=1 << 16)


def _reserve(depot: MemoryDepot, plan: Plan, group: int) -> int:
    (offset,) = depot.engine("e", plan.contract).reserve("w", [in_group(NAME, group)], [PageKind.PREFIX])
    assert offset is not None
    return offset


def _copies(depot: MemoryDepot, group: int, blocks: PageBlocks, offset: int) -> StepOrders:
    return StepOrders(
        epoch=depot.hub.epoch, copies=[PageCopy("w", in_group(NAME, group), group, blocks, offset)], finished=["w"]
    )


def _lease(depot: MemoryDepot, plan: Plan, group: int) -> Leased:
    (page,) = depot.engine("e", plan.contract).lease("r", [in_group(NAME, group)]).pages
    return page


@pytest.mark.parametrize("pages_of", [1, 2])
def test_two_ranks_write_what_one_reads_and_the_other_way_round(depot: MemoryDepot, pages_of: int) -> None:
    wide, narrow = plan(2, 2, pages_of), plan(1, 2, pages_of)
    assert wide.contract.groups[:2] == narrow.contract.groups
    ranks = [Rank(depot, wide, rank, 2) for rank in range(2)]
    for group, tables in ((0, 2), (1, 1)):
        blocks = ((1, 2)[:pages_of],) * tables
        orders = _copies(depot, group, blocks, _reserve(depot, wide, group))
        for rank in ranks:
            assert not depot.hub.index.complete(in_group(NAME, group)) or group == 1, "rank 0 alone writes a latent"
            rank.step(orders)
    for rank in ranks:
        assert rank.side.take_news() == News(finished={"w"}), "the scheduler ends reservations, when all have told"
        rank.side.close()
    for group, tables in ((0, 2), (1, 1)):
        page, reader = _lease(depot, wide, group), Rank(depot, wide, 1, 2)
        before = {name: cache.clone() for name, cache in reader.caches.items()}
        assert reader.load(depot, page, group, ((4, 5)[:pages_of],) * tables)
        for name in ("layers.0", "layers.1") if group == 0 else ("layers.2",):
            assert torch.equal(reader.caches[name][4 : 4 + pages_of], before[name][1 : 1 + pages_of])
        reader.side.close()
    data = bytes(depot.arena)
    other = MemoryDepot(capacity=1 << 16)
    alone = Rank(other, narrow)
    for group, tables in ((0, 2), (1, 1)):
        blocks = ((1, 2)[:pages_of],) * tables
        alone.step(_copies(other, group, blocks, _reserve(other, narrow, group)))
        page, size = _lease(other, narrow, group), narrow.contract.layouts[group].page_bytes
        assert bytes(other.arena[page.offset :][:size]) in data, "byte for byte what two ranks wrote"
    alone.side.close()


def test_a_state_is_copied_at_the_steps_end_without_the_padding_of_its_block(depot: MemoryDepot) -> None:
    kept = plan(1, 1)
    rank = Rank(depot, kept)
    rank.step(_copies(depot, 2, ((3,),), _reserve(depot, kept, 2)), layers=0)
    page = _lease(depot, kept, 2)
    assert bytes(depot.arena[page.offset :][:96]) == rank.caches["layers.3"][3].numpy().tobytes()
    neighbour = rank.caches["layers.3"][5].clone()
    assert rank.load(depot, page, 2, ((4,),))
    assert torch.equal(rank.caches["layers.3"][4], rank.caches["layers.3"][3])
    assert torch.equal(rank.caches["layers.3"][5], neighbour)
    rank.side.close()


def test_a_page_that_ends_before_its_last_block_carries_no_bytes_of_former_pages(depot: MemoryDepot) -> None:
    kept = plan(1, 1, pages_of=2)
    rank = Rank(depot, kept)
    offset, size = _reserve(depot, kept, 0), kept.contract.layouts[0].page_bytes
    depot.arena[offset : offset + size] = b"\x55" * size
    rank.step(_copies(depot, 0, ((1,), (2,)), offset))
    part = size // 2
    assert depot.arena[offset + part // 2 : offset + part] == bytes(part // 2)
    assert 0x55 not in set(depot.arena[offset + part : offset + size][part // 2 :])
    rank.side.close()


def test_blocks_that_the_local_prefix_brought_are_left_alone(depot: MemoryDepot) -> None:
    kept = plan(1, 1)
    rank = Rank(depot, kept)
    rank.step(_copies(depot, 0, ((1,), (1,)), _reserve(depot, kept, 0)))
    page = _lease(depot, kept, 0)
    null, other = rank.caches["layers.0"][0].clone(), rank.caches["layers.1"][4].clone()
    assert rank.load(depot, page, 0, ((4,), (0,)))
    assert torch.equal(rank.caches["layers.0"][4], rank.caches["layers.0"][1])
    assert torch.equal(rank.caches["layers.0"][0], null)
    assert torch.equal(rank.caches["layers.1"][4], other)
    rank.side.close()
