from __future__ import annotations

from itertools import pairwise

import pytest
from depot_kit import name, names
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrelay.depot.base import PageKind
from pdrelay.depot.index import UNCLAIMED_SECONDS, Index
from pdrelay.depot.page import Lost, Page
from pdrelay.errors import ArenaFullError, ProtocolError
from pdrelay.kv.contract import Layout

LAYOUT = Layout(parts=2, part_bytes=64)


def layout_of(name: bytes) -> Layout:
    return LAYOUT


PREFIX, TRANSFER = PageKind.PREFIX, PageKind.TRANSFER


def index_of(pages: int) -> Index:
    return Index(pages * LAYOUT.page_bytes)


def fill(index: Index, owner: str, *numbers: int, kind: PageKind = PREFIX) -> None:
    index.reserve(owner, names(*numbers), [kind] * len(numbers), layout_of)
    for number in numbers:
        index.publish(owner, name(number), 0, [number, number])


def test_least_recently_used_pages_go_first_and_pinned_ones_never() -> None:
    index = index_of(3)
    fill(index, "w", 1, 2, 3)
    index.match(names(1))
    index.pin("reader", names(2))
    fill(index, "w", 4)
    assert [index.complete(name(n)) for n in (1, 2, 3, 4)] == [True, True, False, True]
    index.pin("reader", names(1, 4))
    with pytest.raises(ArenaFullError) as error:
        index.reserve("w", names(5), [PREFIX], layout_of)
    assert not error.value.hopeless
    assert index.reserve_waits == 1


def test_a_prefix_is_evicted_from_its_end() -> None:
    index = index_of(3)
    fill(index, "w", 1, 2, 3)
    index.lease("reader", names(1, 2, 3))
    index.release("reader")
    fill(index, "w", 4)
    assert index.match(names(1, 2, 3)) == 2


def test_reserving_is_all_or_nothing() -> None:
    index = index_of(2)
    with pytest.raises(ArenaFullError) as error:
        index.reserve("w", names(1, 2, 3), [PREFIX] * 3, layout_of)
    assert error.value.hopeless
    assert index.owners == index.used_bytes == len(index) == 0


def test_there_is_one_writer() -> None:
    index = index_of(4)
    assert index.reserve("a", names(1, 2, 1), [PREFIX] * 3, layout_of) == [0, 128, None]
    assert index.reserve("b", names(1, 3), [PREFIX] * 2, layout_of) == [None, 256]
    assert not index.publish("b", name(1), 0, [7])
    with pytest.raises(ProtocolError):
        index.publish("a", name(1), 2, [7])


def test_the_death_of_a_writer_makes_its_incomplete_pages_absent() -> None:
    index = index_of(4)
    index.reserve("a", names(1, 2), [PREFIX] * 2, layout_of)
    index.publish("a", name(1), 0, [5, 5])
    index.publish("a", name(2), 0, [5])
    index.take_changes()
    index.release("a", died=True)
    assert index.take_changes().lost == [Lost(name(2), True)]
    assert index.complete(name(1))
    assert index.get(name(2)) is None


def test_transfer_pages_go_when_nothing_pins_them() -> None:
    index = index_of(4)
    fill(index, "writer", 1, kind=TRANSFER)
    index.pin("reader", names(1))
    index.release("writer")
    assert index.complete(name(1))
    index.release("reader")
    assert index.get(name(1)) is None
    assert index.used_bytes == 0


def test_a_transfer_page_stays_a_while_for_who_claims_it_late() -> None:
    index = index_of(4)
    fill(index, "writer", 1, 2, kind=TRANSFER)
    index.release("writer")
    index.expire(10.0)
    index.pin("late", names(1))
    index.expire(10.0 + UNCLAIMED_SECONDS)
    assert index.complete(name(1))
    assert index.get(name(2)) is None
    assert name(2) in index.take_changes().removed
    index.release("late")
    assert index.used_bytes == 0, "it was claimed, and is not wanted any more"


def test_an_unclaimed_transfer_page_is_the_first_to_make_room() -> None:
    index = index_of(2)
    fill(index, "w", 1)
    fill(index, "w", 2, kind=TRANSFER)
    index.release("w")
    assert index.take_changes().idle == [index.get(name(1))], "nobody need write the other to disk"
    assert index.available == index.capacity
    fill(index, "w", 3)
    assert index.get(name(2)) is None
    assert index.complete(name(1))
    index.expire(0.0)
    index.expire(UNCLAIMED_SECONDS)
    assert index.complete(name(1))


def test_a_pin_may_come_before_its_page() -> None:
    index = index_of(1)
    index.pin("transfer", names(1))
    fill(index, "w", 1)
    with pytest.raises(ArenaFullError):
        index.reserve("w", names(2), [PREFIX], layout_of)


def test_bytes_stay_in_place_while_a_thread_uses_them() -> None:
    index = index_of(1)
    index.reserve("w", names(1), [PREFIX], layout_of)
    page = index.get(name(1))
    assert page is not None
    index.hold(page)
    index.release("w")
    with pytest.raises(ArenaFullError):
        index.reserve("w", names(2), [PREFIX], layout_of)
    index.unhold(page)
    assert index.reserve("w", names(2), [PREFIX], layout_of) == [0]


def test_a_condemned_page_is_absent_at_once_and_its_room_free_when_nobody_reads_it() -> None:
    index = index_of(2)
    fill(index, "w", 1)
    (page,) = index.lease("reader", names(1))
    index.pin("transfer", names(1))
    index.take_changes()
    index.condemn(page)
    index.condemn(page)
    assert (index.match(names(1)), index.lease("late", names(1)), index.condemned) == (0, [], 1)
    changes = index.take_changes()
    assert (changes.removed, changes.lost) == (names(1), [Lost(name(1), True)])
    fill(index, "w", 1)
    (fresh,) = index.lease("late", names(1))
    assert fresh.offset != page.offset
    index.release("late")
    with pytest.raises(ArenaFullError):
        fill(index, "w", 2, 3)
    index.release("reader")
    fill(index, "w", 2)
    assert index.complete(name(1)), "the transfer keeps the name, whichever copy"


def test_a_condemned_page_keeps_its_room_while_its_writer_may_write() -> None:
    index = index_of(1)
    index.reserve("w", names(1), [PREFIX], layout_of)
    page = index.get(name(1))
    assert page is not None
    index.condemn(page)
    assert index.take_changes().lost == [Lost(name(1), True)]
    assert not index.publish("w", name(1), 0, [1, 1])
    with pytest.raises(ArenaFullError):
        fill(index, "v", 1)
    index.release("w")
    fill(index, "v", 1)


OWNERS, NAMES = st.sampled_from("abc"), st.lists(st.integers(0, 7), min_size=1, max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the rules, and when all owners are gone nothing is left but unpinned pages."""

    def __init__(self) -> None:
        super().__init__()
        self.index = index_of(5)
        self.now = 0.0
        self.pins: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
        self.held: list[Page] = []
        self.leased: dict[str, set[Page]] = {"a": set(), "b": set(), "c": set()}
        self.condemned: set[Page] = set()

    @rule(owner=OWNERS, numbers=NAMES, kind=st.sampled_from(PageKind), wide=st.booleans())
    def reserve(self, owner: str, numbers: list[int], kind: PageKind, wide: bool) -> None:
        before = {number: self.index.get(name(number)) for number in numbers}
        layout = Layout(2, 128) if wide else LAYOUT
        try:
            offsets = self.index.reserve(owner, names(*numbers), [kind] * len(numbers), lambda _: layout)
        except ArenaFullError:
            return
        for number, offset in zip(numbers, offsets, strict=True):
            if offset is not None:
                assert before[number] is None
                if kind is TRANSFER:
                    self.pins[owner].add(number)

    @rule(owner=OWNERS, number=st.integers(0, 7), first=st.integers(0, 1))
    def publish(self, owner: str, number: int, first: int) -> None:
        page = self.index.get(name(number))
        accepted = self.index.publish(owner, name(number), first, [number])
        assert not accepted or page is not None

    @rule(owner=OWNERS, numbers=NAMES)
    def pin(self, owner: str, numbers: list[int]) -> None:
        self.index.pin(owner, names(*numbers))
        self.pins[owner] |= set(numbers)

    @rule(owner=OWNERS, numbers=NAMES)
    def unpin(self, owner: str, numbers: list[int]) -> None:
        self.index.unpin(owner, names(*dict.fromkeys(numbers)))
        self.pins[owner] -= set(numbers)

    @rule(owner=OWNERS, numbers=NAMES)
    def lease(self, owner: str, numbers: list[int]) -> None:
        for page in self.index.lease(owner, names(*numbers)):
            assert page.complete
            self.leased[owner].add(page)

    @rule(number=st.integers(0, 7))
    def condemn(self, number: int) -> None:
        if (page := self.index.get(name(number))) is not None:
            self.index.condemn(page)
            self.condemned.add(page)
            assert self.index.get(name(number)) is None

    @rule()
    def expire(self) -> None:
        self.now += UNCLAIMED_SECONDS / 2
        self.index.expire(self.now)

    @rule(owner=OWNERS, died=st.booleans())
    def release(self, owner: str, died: bool) -> None:
        self.index.release(owner, died=died)
        self.pins[owner].clear()
        self.leased[owner].clear()

    @rule(number=st.integers(0, 7))
    def hold(self, number: int) -> None:
        if (page := self.index.get(name(number))) is not None:
            self.index.hold(page)
            self.held.append(page)

    @rule()
    def unhold(self) -> None:
        if self.held:
            self.index.unhold(self.held.pop())

    @invariant()
    def pinned_pages_stay(self) -> None:
        changes = self.index.take_changes()
        pinned = set().union(*self.pins.values())
        dropped = {page.name for page in self.condemned}
        for gone in changes.removed:
            assert int.from_bytes(gone) not in pinned or gone in dropped
        self.condemned.clear()

    @invariant()
    def leased_pages_stay_unless_condemned(self) -> None:
        for page in set().union(*self.leased.values()):
            assert page.users
            assert page.dropped or self.index.get(page.name) is page

    @invariant()
    def extents_are_disjoint_and_within_capacity(self) -> None:
        writers = [page for owner in "abc" for page in self.index.leased(owner)]
        live = {id(page): page for page in [*self.index, *self.held, *writers]}.values()
        spans = sorted((page.offset, page.offset + page.layout.page_bytes) for page in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(end - start for start, end in spans) == self.index.used_bytes <= self.index.capacity

    @invariant()
    def reservations_are_counted(self) -> None:
        assert self.index.reserved == sum(not page.complete for page in self.index)

    def teardown(self) -> None:
        for page in self.held:
            self.index.unhold(page)
        for owner in "abc":
            self.index.release(owner)
        assert self.index.owners == self.index.reserved == self.index.pinned == 0
        self.index.expire(self.now)
        self.index.expire(self.now + UNCLAIMED_SECONDS)
        assert all(page.kind is PREFIX for page in self.index)
        self.index.evict_all([LAYOUT, Layout(2, 128)])
        assert self.index.used_bytes == 0


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
