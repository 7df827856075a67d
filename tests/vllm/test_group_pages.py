"""What a request of a model with several KV groups loads and publishes, on the in-memory depot."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.depot.base import PageKind, Part
from pdrelay.depot.memory import MemoryDepot
from pdrelay.engine.vllm.settings import Settings
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.demand import demand, usable_prefix
from pdrelay.kv.names import group_of, in_group

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own
    pytest.importorskip("vllm")
    from pdrelay.engine.vllm.connector_scheduler import SchedulerSide
    from pdrelay.engine.vllm.depot_connection import DepotConnection
    from pdrelay.engine.vllm.groups import EngineGroup, LayerOf, Plan
    from pdrelay.engine.vllm.jobs import PUBLISH, Job
    from pdrelay.engine.vllm.metadata import StepOrders

pytestmark = pytest.mark.vllm

PAGE, WINDOW = 16, 40
KINDS = ("full_attention", "sliding_window", "linear_state")


def plan(*kinds: str) -> Plan:
    """A group of one layer, and a table of its own, for each kind."""
    contract = KVContract(
        model="m", revision="", page_tokens=PAGE, block_tokens=PAGE,
        groups=tuple(
            KVGroup(kind=kind, layers=1, heads=1, head_size=1, dtype="int8", part_bytes=64, codec="test",
                    window=WINDOW if kind == "sliding_window" else 0)
            for kind in kinds
        ),
    )  # fmt: skip
    groups = tuple(
        EngineGroup((LayerOf(f"layers.{i}", i),), PAGE, 64, 1, 1, is_state=kind == "linear_state")
        for i, kind in enumerate(kinds)
    )
    return Plan(contract, groups)


class Scheduler:
    """The connector's scheduler side for one request."""

    def __init__(self, plan: Plan, tokens: int, *, outputs: int = 0, publish: bool = False) -> None:
        self.plan, self.depot = plan, MemoryDepot(capacity=1 << 16)
        ids = list(range(tokens + outputs))
        params = {PUBLISH: True} if publish else None
        self.request = SimpleNamespace(
            request_id="r", prompt_token_ids=ids[:tokens], all_token_ids=ids, num_tokens=len(ids), cache_salt=None,
            lora_request=None, prompt_embeds=None, mm_features=[], kv_transfer_params=params,
            skip_reading_prefix_cache=False,
            num_preemptions=0, num_computed_tokens=0, is_finished=lambda: False,
        )  # fmt: skip
        settings = Settings(instance="e", depot_socket="", model="m")
        self.side = SchedulerSide(settings, DepotConnection(lambda: self.depot.engine("e", plan.contract)), plan)
        self.side.on_new_request(self.request)

    @property
    def job(self) -> Job:
        return self.side._jobs["r"]

    def store(self, names: list[bytes]) -> None:
        """Pages come to be in the depot."""
        engine = self.depot.engine("e", self.plan.contract)
        engine.reserve("w", names, [PageKind.PREFIX] * len(names))
        engine.publish("w", [Part(name, 0, 7) for name in names])

    def alloc(self, tables: list[list[tuple[int, bool]]], external: int) -> StepOrders:
        """Blocks by table, each with whether the local prefix brought it."""
        blocks = tuple(
            [SimpleNamespace(block_id=i, block_hash=known or None) for i, known in table] for table in tables
        )
        self.side.after_alloc(self.request, SimpleNamespace(blocks=blocks), external)
        orders, self.side._orders = self.side._orders, StepOrders()
        return orders

    def step(self, tables: list[list[int]], start: int, end: int) -> list[tuple[bytes, int]]:
        """Names and blocks that the step copies out."""
        self.request.num_computed_tokens = start
        state = SimpleNamespace(get_block_ids=lambda _: tables)
        output = SimpleNamespace(num_scheduled_tokens={"r": end - start}, kv_connector_block_state=state)
        orders = self.side.step_orders(output)
        return [(copy.name, *table) for copy in orders.copies for table in copy.blocks]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True), st.integers(2, 120), st.integers(0, 40),
    st.integers(0, 3), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_longest_prefix_that_all_groups_can_go_on_from_is_loaded(kinds, tokens, outputs, local, random) -> None:
    kinds.sort(key=KINDS.index)
    scheduler = Scheduler(plan(*kinds), tokens, outputs=outputs)
    groups, job = scheduler.plan.contract.groups, scheduler.job
    limit = tokens + outputs - ("linear_state" in kinds)
    every = [in_group(name, g) for name in (*job.pages.full(job.request.all_token_ids, limit), *job.pages.prompt.names)
             for g in range(len(groups))]  # fmt: skip
    have = {name for name in every if random.random() < 0.8}
    scheduler.store(sorted(have))
    first = min(local, (tokens + outputs - 1) // PAGE)
    if not kinds[0].startswith("full"):
        first = 0
    own = {in_group(name, 0) for name in job.pages.full(job.request.all_token_ids, first * PAGE)}
    prefixes = job.pages.prefixes(job.request.all_token_ids, limit)
    usable = max(usable_prefix(pages, groups, (have | own).__contains__) for pages in prefixes)
    if "sliding_window" in kinds and usable == tokens + outputs:
        usable -= 1  # the last token is computed again, and sees one more than the next one
    external, _ = scheduler.side.matched_tokens(scheduler.request, first * PAGE)
    assert external == max(0, usable - first * PAGE)
    assert bool(external) == (scheduler.depot.hub.stats().leases == 1)
    scheduler.side.close()


def test_pages_go_into_blocks_that_the_local_prefix_did_not_bring() -> None:
    scheduler = Scheduler(plan("full_attention", "sliding_window"), 100)
    scheduler.store(list(demand(scheduler.job.pages.prompt, scheduler.plan.contract.groups).names))
    assert scheduler.side.matched_tokens(scheduler.request, 64) == (35, True)
    full = [(1, True), (2, True), (3, True), (4, True), (5, False), (6, False), (7, False)]
    window = [(0, False), (0, False), (0, False), (14, True), (15, False), (16, False), (17, False)]
    (load,) = scheduler.alloc([full, window], 35).loads
    assert [(page.group, *page.blocks) for page in load.pages] == [
        (0, (5,)), (0, (6,)), (0, (7,)), (1, (15,)), (1, (16,)), (1, (17,))
    ]  # fmt: skip
    scheduler.side.close()


def test_of_a_window_only_what_its_end_can_see_is_published() -> None:
    scheduler = Scheduler(plan("full_attention", "sliding_window"), 100, publish=True)
    assert scheduler.side.matched_tokens(scheduler.request, 0) == (0, False)
    scheduler.alloc([[(i, False) for i in range(1, 8)], [(i, False) for i in range(11, 18)]], 0)
    names = scheduler.job.pages.prompt.names
    first = scheduler.step([list(range(1, 8)), list(range(11, 18))], 0, 64)
    assert first == [(names[i], i + 1) for i in range(4)] + [(in_group(names[3], 1), 14)]
    second = scheduler.step([list(range(1, 8)), [0, 14, 14, 14, 15, 16, 17]], 64, 100)
    assert second == [(names[i], i + 1) for i in (4, 5, 6)] + [(in_group(names[i], 1), i + 11) for i in (4, 5, 6)]
    assert scheduler.side.finished(scheduler.request)["pdrelay"]["error"] == ""
    scheduler.side.close()


def test_a_null_block_is_never_copied() -> None:
    scheduler = Scheduler(plan("full_attention", "sliding_window"), 100, publish=True)
    scheduler.side.matched_tokens(scheduler.request, 0)
    scheduler.alloc([[(i, False) for i in range(1, 8)], [(0, False)] * 5 + [(16, False), (17, False)]], 0)
    copied = scheduler.step([list(range(1, 8)), [0, 0, 0, 0, 0, 16, 17]], 0, 100)
    assert 0 not in [block for _, block in copied]
    error = scheduler.side.finished(scheduler.request)["pdrelay"]["error"]
    assert error == "page 3 of the prompt's sliding_window was gone after token 100, found no block to copy"
    scheduler.side.close()


def test_prefill_stops_where_the_state_is_published() -> None:
    scheduler = Scheduler(plan("full_attention", "linear_state"), 100, publish=True)
    scheduler.side.matched_tokens(scheduler.request, 0)
    scheduler.alloc([[(i, False) for i in range(1, 8)], [(i, False) for i in range(11, 18)]], 0)
    ends = [scheduler.side.chunk_end(scheduler.request, *chunk) for chunk in ((0, 100), (0, 99), (0, 50), (99, 100))]
    assert ends == [99, 99, 50, 100]
    prompt, tables = scheduler.job.pages.prompt, [list(range(1, 8)), [0, 0, 0, 0, 0, 16, 17]]
    assert (prompt.length, len(prompt.names)) == (99, 7)
    edge = scheduler.step(tables, 0, 96)
    assert (in_group(prompt.full[-1], 1), 16) in edge, "a state at a page's edge, for other prompts"
    last = scheduler.step(tables, 96, 99)
    assert last == [(prompt.tail, 7), (in_group(prompt.tail, 1), 17)]
    assert scheduler.step(tables, 99, 100) == []
    assert scheduler.side.finished(scheduler.request)["pdrelay"]["error"] == ""
    scheduler.side.close()


def test_a_state_that_was_passed_by_is_told() -> None:
    scheduler = Scheduler(plan("full_attention", "linear_state"), 100, publish=True)
    scheduler.side.matched_tokens(scheduler.request, 0)
    scheduler.alloc([[(i, False) for i in range(1, 8)], [(0, False)] * 6 + [(17, False)]], 0)
    copied = scheduler.step([list(range(1, 8)), [0, 0, 0, 0, 0, 0, 17]], 0, 100)
    assert {group_of(name) for name, _ in copied} == {0}
    assert "linear_state was gone after token 100" in scheduler.side.finished(scheduler.request)["pdrelay"]["error"]
    scheduler.side.close()


def test_only_growing_groups_are_told_as_held() -> None:
    for kinds, held in ((("full_attention", "sliding_window"), 6), (("sliding_window",), 0)):
        scheduler = Scheduler(plan(*kinds), 100)
        scheduler.alloc([[(i + 10 * t, False) for i in range(1, 8)] for t in range(len(kinds))], 0)
        scheduler.step([[i + 10 * t for i in range(1, 8)] for t in range(len(kinds))], 0, 100)
        assert len(scheduler.depot.hub.held.names_of("e")) == held
        scheduler.side.close()
