"""What transfers promise, on two joined in-memory depots with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from depot_kit import PART_BYTES, contract, intact, name, names, produce, production_of, write_parts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrelay.depot import keeping, link_messages
from pdrelay.depot.base import Delivered, DepotEvent, DepotStats, LinkState, Offered, PageKind, Stalled, Transfer
from pdrelay.depot.index import UNCLAIMED_SECONDS, Index
from pdrelay.depot.memory import MemoryDepot, MemoryDisk, MemoryEngineDepot, link
from pdrelay.depot.page import Page
from pdrelay.depot.receiving import LOST_PEER_SECONDS, PATIENCE, STARVED_SECONDS
from pdrelay.depot.sending import LOST_LINK_SECONDS, STALL_SECONDS
from pdrelay.errors import ArenaFullError

SHAPE = contract()
PREFIX = PageKind.PREFIX
XFERS, NUMBERS = st.sampled_from("xyz"), st.integers(0, 5)


class Pair:
    """Prefill depot `p` linked to decode depot `d`, an engine at each."""

    def __init__(
        self, *, pages_there: int = 32, stepped: bool = False, batch_bytes: int = 1 << 20, disk_there: int = 0
    ) -> None:
        self.now = 0.0
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.p = MemoryDepot("p", 32 * SHAPE.page_bytes, clock=clock)
        self.disk = MemoryDisk(disk_there * SHAPE.page_bytes, stepped=stepped)
        self.d = MemoryDepot("d", pages_there * SHAPE.page_bytes, clock=clock, disk=self.disk)
        self.link = link(self.p, self.d, stepped=stepped, batch_bytes=batch_bytes)
        self.prefill: MemoryEngineDepot = self.p.engine("prefill", SHAPE)
        self.decode: MemoryEngineDepot = self.d.engine("decode", SHAPE)
        self.control = self.p.control()
        self.events: list[DepotEvent] = []
        self.p.hub.subscribe(self.note)
        self.events.clear()  # the present state of the link

    def note(self, event: DepotEvent) -> None:
        if isinstance(event, Offered | Delivered | Stalled | LinkState):
            self.events.append(event)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.p.tick()
        self.d.tick()

    def take_events(self) -> list[DepotEvent]:
        taken, self.events = self.events, []
        return taken

    def stats(self) -> tuple[DepotStats, DepotStats]:
        return self.p.hub.stats(), self.d.hub.stats()

    def check_nothing_is_held(self) -> None:
        for stats in self.stats():
            assert (stats.reserved, stats.pinned, stats.leases, stats.transfers) == (0, 0, 0, 0)
        assert not self.p.hub.senders._by_name
        assert not self.d.hub.receivers._by_name
        assert not self.d.hub.receivers._fetches
        assert all(page.users == 0 for depot in (self.p, self.d) for page in depot.hub.index)


async def test_pages_follow_an_offer_made_before_they_exist() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2, 3), tails=1, to="d", addressee="decode"))
    assert pair.take_events() == [Offered("x", 0)]
    produce(pair.prefill, "r", names(1, 2, 3), SHAPE, tail=True)
    pair.prefill.release("r")
    assert pair.take_events() == [Delivered("x")]
    assert intact(pair.decode, "r", names(1, 2, 3), SHAPE)
    stats = await pair.control.end("x")
    assert (stats.sent, stats.saved, stats.pages, stats.delivered) == (3 * SHAPE.page_bytes, 0, 3, True)
    pair.decode.release("r")
    pair.check_nothing_is_held()
    assert [s.pages for s in pair.stats()] == [2, 2], "the tail went at both ends"


async def test_only_what_is_lacking_travels() -> None:
    pair = Pair()
    produce(pair.decode, "old", names(1), SHAPE)
    pair.decode.report_held(names(2), [])
    produce(pair.prefill, "r", names(1, 2, 3), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2, 3), to="d", addressee="decode"))
    assert pair.take_events() == [Offered("x", 2), Delivered("x")]
    stats = await pair.control.transfer_stats("x")
    assert (stats.sent, stats.saved) == (SHAPE.page_bytes, 2 * SHAPE.page_bytes)
    pair.decode.report_held([], names(2))
    assert pair.d.hub.index.complete(name(2)), "what the engine lost is sent after all"
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_an_offer_is_as_cheap_with_many_transfers_under_way_as_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[bytes] = []
    get = Index.get

    def counted(self: Index, page: bytes) -> Page | None:
        looked_up.append(page)
        return get(self, page)

    monkeypatch.setattr(Index, "get", counted)
    pair, costs = Pair(pages_there=512), []
    for number in range(200):
        looked_up.clear()
        await pair.control.transfer(Transfer(xfer=f"x{number}", names=names(2 * number, 2 * number + 1), to="d"))
        costs.append(len(looked_up))
    assert costs[-1] <= costs[10]


async def test_parts_stream_on_before_their_page_is_complete() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3))
    assert pair.d.hub.stats().received_bytes == 3 * SHAPE.layouts[0].part_bytes
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3, 4))
    assert Delivered("x") in pair.take_events()
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_one_name_is_fetched_once_and_again_when_its_source_ends() -> None:
    pair = Pair()
    (local,) = pair.decode.reserve("local", names(1), [PREFIX])
    assert local is not None
    produce(pair.prefill, "r", names(1, 2), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    await pair.control.transfer(Transfer(xfer="y", names=names(2), to="d"))
    assert pair.d.hub.stats().received_bytes == SHAPE.page_bytes
    pair.decode.release("local")
    assert pair.d.hub.stats().received_bytes == 2 * SHAPE.page_bytes
    assert Delivered("x") in pair.take_events()
    await pair.control.end("x")
    await pair.control.end("y")
    pair.check_nothing_is_held()


async def test_a_second_transfer_takes_over_from_one_that_ends() -> None:
    pair = Pair(stepped=True)
    produce(pair.prefill, "r", names(1), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    await pair.control.transfer(Transfer(xfer="y", names=names(1), to="d"))
    for _ in range(2):
        pair.link.deliver_message()
    await pair.control.end("x")
    while pair.link.step():
        pass
    assert Delivered("y") in pair.take_events()
    await pair.control.end("y")
    while pair.link.step():
        pass
    pair.check_nothing_is_held()


async def test_corrupt_parts_are_dropped_counted_and_sent_again() -> None:
    pair = Pair(batch_bytes=SHAPE.layouts[0].part_bytes)
    pair.link.corrupt_next = 3
    produce(pair.prefill, "r", names(1, 2), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    assert Delivered("x") in pair.take_events()
    assert intact(pair.decode, "r", names(1, 2), SHAPE)
    assert pair.d.hub.stats().corrupt_parts == 3
    pair.decode.release("r")
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_a_full_receiver_wants_later() -> None:
    pair = Pair(pages_there=2)
    produce(pair.decode, "busy", names(8, 9), SHAPE)
    pair.decode.lease("busy", names(8, 9))
    produce(pair.prefill, "r", names(1, 2), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    assert pair.take_events() == [Offered("x", 0)]
    assert pair.d.hub.stats().reserve_waits > 0
    pair.decode.release("busy")
    assert pair.take_events() == [Delivered("x")]
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_two_large_transfers_do_not_starve_each_other() -> None:
    pair = Pair(pages_there=3)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    await pair.control.transfer(Transfer(xfer="y", names=names(3, 4), to="d"))
    produce(pair.prefill, "r", names(4, 3, 2, 1), SHAPE)
    (first,) = [event.xfer for event in pair.take_events() if isinstance(event, Delivered)]
    await pair.control.end(first)
    (second,) = [event.xfer for event in pair.take_events() if isinstance(event, Delivered)]
    assert {first, second} == {"x", "y"}
    await pair.control.end(second)
    pair.check_nothing_is_held()


async def test_room_goes_to_a_transfer_whose_pages_are_there_before_one_whose_prompt_waits() -> None:
    pair = Pair(pages_there=4)
    await pair.control.transfer(Transfer(xfer="unborn", names=names(1, 2, 3), to="d"))
    produce(pair.prefill, "r", names(11, 12), SHAPE)
    await pair.control.transfer(Transfer(xfer="here", names=names(11, 12), to="d"))
    assert Delivered("here") in pair.take_events(), "at once: nothing of the other's is lost"
    await pair.control.end("here")
    produce(pair.prefill, "r", names(1, 2, 3), SHAPE)
    assert Delivered("unborn") in pair.take_events()
    await pair.control.end("unborn")
    pair.check_nothing_is_held()


async def test_transfers_let_go_of_parts_of_prompts_when_no_prompt_finds_room() -> None:
    pair = Pair()
    pair.link.cut()
    produce(pair.prefill, "old", names(*range(16)), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(*range(16), *range(100, 110)), to="d"))
    produce(pair.prefill, "old", names(*range(16, 28)), SHAPE)
    await pair.control.transfer(Transfer(xfer="y", names=names(*range(16, 28), *range(110, 120)), to="d"))
    wanted = names(*range(16), *range(100, 110))
    with pytest.raises(ArenaFullError):
        pair.prefill.reserve("x", wanted, [PREFIX] * 26)
    pair.advance(0.1)
    pair.advance(keeping.STARVED_SECONDS)
    offsets = pair.prefill.reserve("x", wanted, [PREFIX] * 26)
    assert offsets[:16] == [None] * 16, "what is here of the prompt stays"
    pair.prefill.release("x")
    for xfer in ("x", "y"):
        await pair.control.end(xfer)
    pair.link.mend()
    pair.check_nothing_is_held()


async def test_room_held_for_pages_that_find_none_at_the_sender_is_given_to_those_that_are_there() -> None:
    pair = Pair(pages_there=24)
    young, old = range(100, 120), range(20)
    await pair.control.transfer(Transfer(xfer="unborn", names=names(*young), to="d"))
    produce(pair.prefill, "r", names(*old), SHAPE)
    await pair.control.transfer(Transfer(xfer="here", names=names(*old), to="d"))
    with pytest.raises(ArenaFullError):  # "here" pins its pages, and waits for the room of "unborn" at the other end
        pair.prefill.reserve("s", names(*young), [PREFIX] * len(young))
    for _ in range(3):
        pair.advance(STARVED_SECONDS)
    assert Delivered("here") in pair.take_events()
    await pair.control.end("here")
    produce(pair.prefill, "s", names(*young), SHAPE)
    assert Delivered("unborn") in pair.take_events()
    await pair.control.end("unborn")
    pair.check_nothing_is_held()


async def test_a_new_prompt_goes_before_what_only_a_demoted_transfer_keeps() -> None:
    pair = Pair()
    pair.link.cut()
    produce(pair.prefill, "r", names(*range(30)), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(*range(30)), to="d"))
    await pair.control.demote("x")
    produce(pair.prefill, "s", names(*range(100, 110)), SHAPE)
    assert pair.p.hub.index.match(names(*range(100, 110))) == 10
    pair.link.mend()
    pair.check_nothing_is_held()


async def test_a_demoted_transfer_that_began_on_a_broken_link_is_given_up() -> None:
    pair = Pair()
    pair.link.cut()
    produce(pair.prefill, "r", names(1), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    await pair.control.demote("x")
    pair.advance(LOST_LINK_SECONDS)
    pair.advance(LOST_LINK_SECONDS)
    pair.check_nothing_is_held()


async def test_after_a_cut_only_missing_parts_are_sent_again() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3))
    pair.link.cut()
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3, 4))
    pair.link.mend()
    assert [type(event) for event in pair.take_events()] == [Offered, LinkState, LinkState, Delivered]
    assert (await pair.control.end("x")).sent == SHAPE.page_bytes
    pair.check_nothing_is_held()


async def test_a_new_production_is_never_mixed_with_the_old_one() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3))
    pair.prefill.close()
    pair.prefill = pair.p.engine("prefill", SHAPE)
    assert pair.take_events() == [Offered("x", 0), Stalled("x", names(1))]
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3, 4))
    assert not pair.d.hub.index.complete(name(1))
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(3))
    assert pair.take_events() == [Delivered("x")]
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_a_page_that_was_given_up_stalls_after_a_while() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    pair.prefill.reserve("r", names(1, 2), [PREFIX] * 2)
    pair.prefill.release("r")
    pair.advance(1)
    produce(pair.prefill, "r", names(2), SHAPE)
    pair.advance(1.5)
    assert pair.take_events() == [Offered("x", 0), Stalled("x", names(1))]
    await pair.control.end("x")
    pair.check_nothing_is_held()


@pytest.mark.parametrize("to", ["d", None])
async def test_a_depot_that_hears_of_a_transfer_after_prefill_has_ended_still_has_the_last_page(to: str | None) -> None:
    pair = Pair()
    produce(pair.prefill, "r", names(1, 2), SHAPE, tail=True)
    pair.prefill.release("r")
    pair.advance(UNCLAIMED_SECONDS / 2)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), tails=1, to=to, addressee="decode"))
    pair.advance(2 * UNCLAIMED_SECONDS)
    here = pair.decode if to else pair.prefill
    assert intact(here, "r", names(1, 2), SHAPE)
    here.release("r")
    await pair.control.end("x")
    pair.check_nothing_is_held()
    assert [s.pages for s in pair.stats()] == [1, 1 if to else 0], "the tail went at both ends"


async def test_absent_pages_are_lost_once_nobody_produces_any_more() -> None:
    pair = Pair()
    produce(pair.prefill, "r", names(1), SHAPE)
    wish = Transfer(xfer="x", names=names(1, 2, 3), tails=1, to="d")
    await pair.control.transfer(wish)
    pair.advance(100)
    assert pair.take_events() == [Offered("x", 0)], "prefill waits for its turn, perhaps"
    (offset,) = pair.prefill.reserve("r", names(2), [PREFIX])
    assert offset is not None
    produced = msgspec.structs.replace(wish, produced=True)
    await pair.control.transfer(produced)
    pair.take_events()
    for _ in range(2):
        pair.advance(STALL_SECONDS)
    assert pair.take_events() == [Stalled("x", names(3))], "2 is being written"
    pair.advance(10 * STALL_SECONDS)
    assert not pair.take_events(), "once: it may be produced again now"
    pair.prefill.release("r")
    produce(pair.prefill, "again", names(2, 3), SHAPE, tail=True)
    assert pair.take_events() == [Delivered("x")]
    await pair.control.end("x")
    pair.prefill.release("again")
    pair.check_nothing_is_held()


async def test_absent_pages_that_nobody_lacks_are_not_lost() -> None:
    pair = Pair()
    pair.prefill.report_held(names(1), [])
    pair.decode.report_held(names(1, 2), [])
    produced = {"names": names(1, 2), "produced": True}
    await pair.control.transfer(Transfer(xfer="there", to="d", addressee="decode", **produced))
    await pair.control.transfer(Transfer(xfer="here", to=None, addressee="prefill", **produced))
    pair.take_events()
    for _ in range(2):
        pair.advance(STALL_SECONDS)
    assert pair.take_events() == [Stalled("here", names(2))]
    for xfer in ("there", "here"):
        await pair.control.end(xfer)
    pair.check_nothing_is_held()


async def test_a_demoted_transfer_finishes_without_tail_and_ends_by_itself() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2, 3), tails=1, to="d"))
    produce(pair.prefill, "r", names(1), SHAPE)
    await pair.control.demote("x")
    await pair.control.aclose()
    produce(pair.prefill, "r", names(2), SHAPE)
    pair.check_nothing_is_held()
    assert pair.d.hub.index.match(names(1, 2)) == 2


async def test_a_demoted_transfer_does_not_wait_for_what_never_comes() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    produce(pair.prefill, "r", names(1), SHAPE)
    await pair.control.demote("x")
    pair.advance(0.5)
    pair.advance(3)
    pair.check_nothing_is_held()
    assert pair.d.hub.index.match(names(1, 2)) == 1


async def test_a_lost_sender_is_forgotten_after_a_grace() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    produce(pair.prefill, "r", names(1), SHAPE)
    pair.link.cut()
    pair.advance(LOST_PEER_SECONDS / 2)
    assert pair.d.hub.stats().transfers == 1
    pair.advance(LOST_PEER_SECONDS)
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_small_transfers_go_first_and_demoted_ones_last() -> None:
    pair = Pair(stepped=True, batch_bytes=SHAPE.page_bytes)
    produce(pair.prefill, "r", names(*range(1, 9)), SHAPE)
    await pair.control.transfer(Transfer(xfer="demoted", names=names(1), to="d"))
    await pair.control.demote("demoted")
    await pair.control.transfer(Transfer(xfer="large", names=names(2, 3, 4, 5, 6), to="d"))
    await pair.control.transfer(Transfer(xfer="small", names=names(7, 8), to="d"))
    while pair.link.deliver_message():
        pass
    while pair.link.step():
        pass
    assert [e.xfer for e in pair.take_events() if isinstance(e, Delivered)] == ["small", "large", "demoted"]
    await pair.control.end("small")
    await pair.control.end("large")
    while pair.link.step():
        pass
    pair.check_nothing_is_held()


def test_a_peer_with_another_contract_is_refused() -> None:
    p, d = MemoryDepot("p"), MemoryDepot("d")
    p.engine("prefill", SHAPE)
    d.engine("decode", contract(dtype="bfloat16"))
    seen: list[DepotEvent] = []
    p.hub.subscribe(seen.append)
    link(p, d)
    (state,) = seen
    assert isinstance(state, LinkState)
    assert not state.up
    for word in ("dtype", "float32", "bfloat16"):
        assert word in state.detail


async def test_a_transfer_may_be_offered_before_any_engine_is_known() -> None:
    p, d = MemoryDepot("p"), MemoryDepot("d")
    link(p, d)
    control = p.control()
    await control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    produce(p.engine("prefill", SHAPE), "r", names(1), SHAPE)
    assert d.hub.index.complete(name(1))
    await control.aclose()
    assert (d.hub.stats().transfers, d.hub.stats().leases) == (0, 0)


async def test_what_is_corrupt_at_its_source_does_not_flood_the_line() -> None:
    pair = Pair()
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(4))
    pair.prefill.arena[offset] ^= 0xFF
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    assert pair.d.hub.stats().corrupt_parts < 20
    pair.prefill.arena[offset] ^= 0xFF
    pair.advance(1)
    assert Delivered("x") in pair.take_events()
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_a_page_that_became_corrupt_at_its_sender_is_produced_anew() -> None:
    pair = Pair()
    produce(pair.prefill, "r", names(1, 2), SHAPE)
    page = pair.p.hub.index.get(name(2))
    assert page is not None
    pair.p.arena[page.offset + PART_BYTES] ^= 1
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    assert pair.take_events() == [Offered("x", 0)]
    pair.advance(1)
    assert pair.take_events() == [Stalled("x", names(2))]
    assert pair.p.hub.stats().corrupt_pages == 1
    assert pair.d.hub.stats().corrupt_parts == PATIENCE + 1
    produce(pair.prefill, "again", names(1, 2), SHAPE)
    assert pair.take_events() == [Delivered("x")]
    assert intact(pair.decode, "r", names(1, 2), SHAPE)
    pair.decode.release("r")
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_a_part_that_became_corrupt_before_its_page_was_complete_is_produced_anew() -> None:
    pair = Pair()
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    pair.link.cut()
    (offset,) = pair.prefill.reserve("r", names(1), [PREFIX])
    assert offset is not None
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(2))
    pair.p.arena[offset] ^= 1
    pair.link.mend()
    pair.take_events()
    pair.advance(1)
    assert pair.take_events() == [Stalled("x", names(1))]
    write_parts(pair.prefill, "r", name(1), offset, SHAPE, range(2, 4))  # it has not heard of that yet
    produce(pair.prefill, "again", names(1), SHAPE)
    assert pair.take_events() == [Delivered("x")]
    assert intact(pair.decode, "d", names(1), SHAPE)
    for engine, owner in ((pair.decode, "d"), (pair.prefill, "r"), (pair.prefill, "again")):
        engine.release(owner)
    await pair.control.end("x")
    pair.check_nothing_is_held()


async def test_a_page_that_became_corrupt_where_it_was_received_is_fetched_again() -> None:
    pair = Pair()
    produce(pair.prefill, "r", names(1, 2), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    (_, leased) = pair.decode.lease("r", names(1, 2)).pages
    pair.d.arena[leased.offset] ^= 1
    pair.decode.corrupt("r", names(2))
    assert intact(pair.decode, "again", names(1, 2), SHAPE)
    assert pair.d.hub.stats().corrupt_pages == 1
    assert (await pair.control.end("x")).sent == 3 * SHAPE.page_bytes
    pair.decode.release("r")
    pair.decode.release("again")
    pair.check_nothing_is_held()


class Chaos(RuleBasedStateMachine):
    """Whatever happens in whatever order: no page mixes two productions, and in the end nothing is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(pages_there=4, stepped=True, batch_bytes=2 * PART_BYTES, disk_there=4)
        self.production: dict[int, int] = {}
        self.productions = 0

    @rule(xfer=XFERS, first=NUMBERS, count=st.integers(1, 4))
    def transfer(self, xfer: str, first: int, count: int) -> None:
        wish = Transfer(xfer=xfer, names=names(*range(first, first + count)), to="d", addressee="decode")
        with self.pair.p.turn():
            self.pair.p.hub.transfer(wish, "gateway")

    @rule(xfer=XFERS)
    def end(self, xfer: str) -> None:
        with self.pair.p.turn():
            self.pair.p.hub.end(xfer)

    @rule(xfer=XFERS)
    def demote(self, xfer: str) -> None:
        with self.pair.p.turn():
            self.pair.p.hub.demote(xfer)

    @rule(number=NUMBERS)
    def reserve(self, number: int) -> None:
        (offset,) = self.pair.prefill.reserve(f"r{number}", names(number), [PREFIX])
        if offset is not None:
            self.productions += 1
            self.production[number] = self.productions

    @rule(number=NUMBERS, parts=st.sampled_from([range(2), range(2, 4), range(4)]))
    def write(self, number: int, parts: range) -> None:
        page = self.pair.p.hub.index.get(name(number))
        if page is not None and not page.complete:
            production = self.production[number]
            write_parts(self.pair.prefill, f"r{number}", page.name, page.offset, SHAPE, parts, production)

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        self.pair.prefill.release(f"r{number}")

    @rule()
    def crash(self) -> None:
        self.pair.prefill.close()
        self.pair.prefill = self.pair.p.engine("prefill", SHAPE)

    @rule(numbers=st.lists(NUMBERS, unique=True))
    def lease(self, numbers: list[int]) -> None:
        self.pair.decode.lease("l", names(*numbers))

    @rule()
    def unlease(self) -> None:
        self.pair.decode.release("l")

    @rule(number=NUMBERS, held=st.booleans())
    def report_held(self, number: int, held: bool) -> None:
        self.pair.decode.report_held(names(number) if held else [], [] if held else names(number))

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.pair.link.step()

    @rule()
    def cut_or_mend(self) -> None:
        if self.pair.link.up:
            self.pair.link.cut()
        else:
            self.pair.link.mend()

    @rule(count=st.integers(0, 3))
    def corrupt(self, count: int) -> None:
        self.pair.link.corrupt_next = count

    @rule(number=NUMBERS, part=st.integers(0, 3), there=st.booleans())
    def flip(self, number: int, part: int, there: bool) -> None:
        """A bit flips in the arena of one side, in a part that is there."""
        depot = self.pair.d if there else self.pair.p
        page = depot.hub.index.get(name(number))
        if page is not None and page.have >> part & 1:
            depot.arena[page.offset + part * PART_BYTES + 500] ^= 1

    @rule(count=st.integers(1, 4))
    def step_disk(self, count: int) -> None:
        for _ in range(count):
            with self.pair.d.turn():
                self.pair.disk.step()

    @rule(broken=st.booleans())
    def break_disk(self, broken: bool) -> None:
        self.pair.disk.broken = broken

    @rule(page=st.integers(0, 3))
    def flip_on_disk(self, page: int) -> None:
        self.pair.disk.data[page * SHAPE.page_bytes + 700] ^= 1

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @invariant()
    def complete_pages_are_of_one_production(self) -> None:
        for page in self.pair.d.hub.index:
            if page.complete and self.pair.d.hub.intact(page):  # no reader takes another
                assert production_of(self.pair.decode, page.name, page.offset, SHAPE) is not None

    def teardown(self) -> None:
        if not self.pair.link.up:
            self.pair.link.mend()
        for xfer in ("x", "y", "z"):
            self.end(xfer)
        self.pair.prefill.close()
        self.pair.decode.close()
        self.drain()
        self.pair.check_nothing_is_held()
        disk = self.pair.d.hub.tier.stats()
        assert disk.used_bytes == disk.pages * SHAPE.page_bytes

    def drain(self) -> None:
        """All that is under way comes to its end."""
        moved = True
        while moved:
            with self.pair.d.turn():
                moved = self.pair.link.step() or self.pair.disk.step()


class Delivery(Chaos):
    """As Chaos; and a transfer whose pages are all produced is delivered once the line is up and there is room."""

    def teardown(self) -> None:
        self.pair.link.corrupt_next = 0
        if not self.pair.link.up:
            self.pair.link.mend()
        for xfer in ("x", "y", "z"):
            self.end(xfer)
        self.unlease()
        wish = Transfer(xfer="last", names=names(0, 1, 2), to="d", addressee="decode")
        with self.pair.p.turn():
            self.pair.p.hub.transfer(wish, "gateway")
        self.crash()
        for _ in range(3):  # what is corrupt at its sender is noticed, and then produced anew
            for number in range(3):
                self.reserve(number)
                self.write(number, range(4))
            self.drain()
            self.advance(0.5)
        assert self.pair.p.hub.senders.stats("last").delivered
        self.end("last")
        super().teardown()


Delivery.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestDelivery = Delivery.TestCase


@pytest.mark.parametrize("whole", [True, False])
async def test_transfers_that_all_hold_complete_pages_and_wait_for_more_do_not_wait_for_each_other(whole: bool) -> None:
    pair = Pair(pages_there=6)
    produce(pair.prefill, "r", names(1, 2, 3, 4, 11, 12, 13, *[5] * whole), SHAPE)
    busy = pair.decode.reserve("busy", names(*range(20, 24)), [PREFIX] * 4)
    assert None not in busy
    await pair.control.transfer(Transfer(xfer="b", names=names(11, 12, 13), to="d"))
    await pair.control.demote("b")
    await pair.control.transfer(Transfer(xfer="a", names=names(1, 2, 3, 4, 5), to="d"))
    pair.decode.release("busy")
    if not whole:
        assert pair.d.hub.index.match(names(11, 12)) == 2
        assert pair.d.hub.index.match(names(1, 2, 3, 4, 5)) == 4, "the room is full, and both wait"
        for _ in range(3):
            pair.advance(STARVED_SECONDS)
        produce(pair.prefill, "r", names(5), SHAPE)
    assert Delivered("a") in pair.take_events()
    await pair.control.end("a")
    assert Delivered("b") in pair.take_events(), "what it let go was sent once more"
    assert pair.d.hub.index.match(names(11, 12, 13)) == 3
    pair.check_nothing_is_held()


async def test_a_page_that_is_wanted_anew_while_it_is_under_way_is_sent_again() -> None:
    pair = Pair(stepped=True)
    produce(pair.prefill, "r", names(1), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(1), to="d"))
    while pair.link.deliver_message():
        pass
    source = pair.p.hub.senders
    batch = source.next_batch("d", 1 << 20, 0.0)
    assert batch is not None
    source.on_message("d", link_messages.Wants("x", [link_messages.Want(name(1), 0, b"")]))
    source.outbox.written(batch)
    source.outbox.acknowledged(batch)  # the receiver had given the page up when it came
    assert pair.link.deliver_batch()
    while pair.link.step():
        pass
    assert Delivered("x") in pair.take_events()
    await pair.control.end("x")
    while pair.link.step():
        pass
    pair.check_nothing_is_held()


async def test_room_is_looked_for_while_a_lost_peers_transfers_end() -> None:
    pair = Pair(pages_there=2)
    q = MemoryDepot("q", 8 * SHAPE.page_bytes, clock=lambda: pair.now)
    other = link(q, pair.d)
    await q.control().transfer(Transfer(xfer="unborn", names=names(1, 2), to="d"))
    produce(pair.prefill, "r", names(3), SHAPE)
    await pair.control.transfer(Transfer(xfer="x", names=names(3), to="d"))
    other.cut()
    pair.advance(LOST_PEER_SECONDS)
    assert Delivered("x") in pair.take_events()
    await pair.control.end("x")
    pair.check_nothing_is_held()
