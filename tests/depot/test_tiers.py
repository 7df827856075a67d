"""The disk tier: pages come back from it, and whatever goes wrong there is a miss."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from depot_kit import KEY, PART_BYTES, contract, intact, name, names, produce, until

from pdrelay.depot.arena import Arena
from pdrelay.depot.base import Delivered, DepotEvent, DiskStats, Removed, Stalled, Transfer
from pdrelay.depot.disk import FileDisk, NoDisk, open_disk
from pdrelay.depot.engine_client import connect_engine
from pdrelay.depot.hub import Hub
from pdrelay.depot.memory import MemoryDepot, MemoryDisk, link
from pdrelay.depot.server import DepotServer
from pdrelay.depot.tiers import MAX_ERRORS, STUCK_SECONDS
from pdrelay.errors import StartError

SHAPE = contract()
PAGE = SHAPE.page_bytes


class Site:
    """A depot with room for `pages` pages and `disk` more on disk, and an engine."""

    def __init__(self, pages: int = 4, disk: int = 16, depot: str = "d", *, stepped: bool = False) -> None:
        self.now = 0.0
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.disk = MemoryDisk(disk * PAGE, stepped=stepped)
        self.depot = MemoryDepot(depot, pages * PAGE, clock=clock, disk=self.disk)
        self.engine = self.depot.engine("e", SHAPE)
        self.removed: list[bytes] = []
        self.events: list[DepotEvent] = []
        self.depot.hub.subscribe(self.note)

    def note(self, event: DepotEvent) -> None:
        self.events.append(event)
        if isinstance(event, Removed):
            self.removed += event.names

    def fill(self, *numbers: int) -> None:
        """Produces pages one by one, each of which may be evicted at once."""
        for number in numbers:
            produce(self.engine, "w", names(number), SHAPE)

    def in_arena(self, *numbers: int) -> list[bool]:
        return [self.depot.hub.index.complete(name(number)) for number in numbers]

    @property
    def stats(self) -> DiskStats:
        return self.depot.hub.stats().disk

    def check_nothing_is_held(self) -> None:
        hub = self.depot.hub
        assert hub.stats().leases == hub.index.reserved == 0
        assert all(page.users == 0 for page in hub.index)
        assert self.stats.used_bytes == self.stats.pages * PAGE
        assert hub.index.used_bytes == len(hub.index) * PAGE


def test_what_is_evicted_comes_back_from_disk() -> None:
    site = Site()
    site.fill(*range(8))
    assert site.in_arena(*range(8)) == [False] * 4 + [True] * 4
    assert not site.removed
    assert site.engine.match(names(0, 1, 2)) == 3, "what is on disk counts, and is brought back"
    assert site.in_arena(0, 1, 2) == [True] * 3
    assert intact(site.engine, "r", names(0, 1, 2), SHAPE)
    site.engine.release("r")
    assert (site.stats.written_pages, site.stats.restored_pages) == (8, 3)
    site.check_nothing_is_held()


def test_a_lease_says_what_is_coming_and_where_it_came_from() -> None:
    site = Site(stepped=True)
    site.fill(0, 1, 2, 3)
    while site.disk.step():
        pass
    site.fill(4, 5)
    grant = site.engine.lease("r", names(0, 1, 2))
    assert ([page.offset for page in grant.pages], grant.coming) == ([], 3)
    while site.disk.step():
        pass
    grant = site.engine.lease("r", names(0, 1, 2))
    assert ([page.from_disk for page in grant.pages], grant.coming) == ([True, True, False], 0)
    assert [page.from_disk for page in site.engine.lease("s", names(0, 1, 2)).pages] == [False] * 3
    site.engine.release("r")
    site.engine.release("s")
    site.check_nothing_is_held()


async def test_wait_brings_pages_back() -> None:
    site = Site()
    site.fill(*range(8))
    control = site.depot.control()
    async with asyncio.timeout(5):
        await control.wait(names(0, 1))
    assert site.in_arena(0, 1) == [True, True]
    await control.aclose()
    site.check_nothing_is_held()


async def test_a_transfer_brings_pages_back_at_its_source_and_needs_no_line_for_those_on_disk_at_its_target() -> None:
    here, there = Site(depot="p"), Site(depot="d")
    link(here.depot, there.depot)
    there.fill(0, 1, 20, 21, 22, 23)
    assert there.in_arena(0, 1) == [False, False]
    here.fill(*range(8))
    control = here.depot.control()
    await control.transfer(Transfer(xfer="x", names=names(0, 1, 2), to="d"))
    assert Delivered("x") in here.events
    assert intact(there.engine, "r", names(0, 1, 2), SHAPE)
    there.engine.release("r")
    stats = await control.end("x")
    assert (stats.sent, stats.saved, stats.pages) == (PAGE, 2 * PAGE, 1)
    await control.aclose()
    for site in (here, there):
        site.check_nothing_is_held()


async def test_what_is_corrupt_on_disk_is_fetched_over_the_line() -> None:
    here, there = Site(pages=32, depot="p"), Site(depot="d")
    link(here.depot, there.depot)
    here.fill(0, 1)
    there.fill(0, 1, 20, 21, 22, 23)
    for at in range(PART_BYTES // 2, len(there.disk.data), PART_BYTES):
        there.disk.data[at] ^= 4
    control = here.depot.control()
    await control.transfer(Transfer(xfer="x", names=names(0, 1), to="d"))
    assert Delivered("x") in here.events
    assert intact(there.engine, "r", names(0, 1), SHAPE)
    there.engine.release("r")
    assert (await control.end("x")).sent == 2 * PAGE
    assert there.stats.corrupt_pages == 2
    await control.aclose()
    there.check_nothing_is_held()


async def test_what_cannot_be_read_back_at_the_source_is_produced_anew() -> None:
    here, there = Site(depot="p"), Site(depot="d")
    link(here.depot, there.depot)
    here.fill(*range(6))
    here.disk.broken = True
    control = here.depot.control()
    await control.transfer(Transfer(xfer="x", names=names(0), to="d"))
    here.now += 3
    here.depot.tick()
    assert Stalled("x", names(0)) in here.events
    produce(here.engine, "w", names(0), SHAPE)
    assert Delivered("x") in here.events
    await control.end("x")
    await control.aclose()
    here.check_nothing_is_held()


def test_errors_are_misses_and_many_in_a_row_end_the_tier() -> None:
    site = Site()
    site.fill(*range(6))
    site.disk.broken = True
    assert site.engine.match(names(0)) == 1, "it is on disk"
    assert site.engine.match(names(0)) == 0, "and cannot be read"
    assert name(0) in site.removed
    assert (site.stats.state, site.stats.errors) == ("on", 1)
    site.fill(*range(6, 6 + MAX_ERRORS))
    assert site.stats.state.startswith("off: 8 errors in a row")
    assert (site.stats.pages, site.stats.used_bytes) == (0, 0)
    assert name(1) in site.removed
    site.disk.broken = False
    site.fill(30, 31)
    assert intact(site.engine, "r", names(30, 31), SHAPE), "the depot goes on"
    site.engine.release("r")
    site.check_nothing_is_held()


async def test_a_disk_that_does_not_answer_is_given_up_and_its_late_answer_harms_nobody() -> None:
    here, there = Site(pages=32, depot="p"), Site(depot="d", stepped=True)
    link(here.depot, there.depot)
    here.fill(0)
    there.fill(0)
    while there.disk.step():
        pass
    for number in (20, 21, 22, 23):
        there.fill(number)
        while there.disk.step():
            pass
    control = here.depot.control()
    await control.transfer(Transfer(xfer="x", names=names(0), to="d"))
    assert there.disk.waiting == 1
    there.now += STUCK_SECONDS
    there.depot.tick()
    assert Delivered("x") in here.events, "it came over the line"
    assert there.stats.state == f"off: no answer for {STUCK_SECONDS:.0f} s"
    while there.disk.step():
        pass
    assert intact(there.engine, "r", names(0), SHAPE)
    there.engine.release("r")
    await control.end("x")
    await control.aclose()
    there.check_nothing_is_held()


def test_a_page_that_is_evicted_while_it_is_written_is_not_on_disk() -> None:
    site = Site(pages=2, stepped=True)
    site.fill(0, 1, 2, 3)
    assert site.disk.waiting == 2, "0 and 1 were being written, and are gone"
    while site.disk.step():
        pass
    assert not site.depot.hub.tier.holds(name(0))
    assert site.engine.match(names(0)) == 0
    assert site.engine.match(names(2, 3)) == 2
    site.check_nothing_is_held()


def test_the_disk_is_evicted_least_recently_used_first() -> None:
    site = Site(pages=2, disk=4)
    site.fill(0, 1, 2, 3)
    site.engine.match(names(0))
    site.fill(4, 5)
    assert [site.depot.hub.tier.holds(name(n)) for n in range(6)] == [True, False, False, True, True, True]
    assert set(site.removed) == set(names(1, 2))
    site.check_nothing_is_held()


def test_tails_and_pages_with_room_stay_off_the_disk() -> None:
    site = Site(pages=8)
    produce(site.engine, "w", names(0, 1, 2), SHAPE, tail=True)
    site.engine.release("w")
    assert site.stats.written_pages == 0, "there is room in the arena"
    for first in range(10, 20, 2):
        produce(site.engine, "w", names(first, first + 1), SHAPE, tail=True)
        site.engine.release("w")
    assert not site.depot.hub.tier.holds(name(11))
    site.check_nothing_is_held()


def test_a_new_contract_voids_what_is_on_disk() -> None:
    site = Site()
    site.fill(*range(6))
    site.engine.close()
    changed = site.depot.engine("e", contract(dtype="bfloat16"))
    assert changed.match(names(0)) == site.stats.pages == site.stats.used_bytes == 0


async def test_a_file_below_a_real_depot(tmp_path: Path) -> None:
    arena = Arena(8 * PAGE)
    disk = open_disk(str(tmp_path / "kv"), 64 * PAGE)
    assert not os.listdir(tmp_path), "nothing can leak"
    server = DepotServer(Hub("here", arena.view, KEY, time.monotonic, disk=disk), arena)
    await server.start(tmp_path / "depot.sock")
    engine = await asyncio.to_thread(connect_engine, tmp_path / "depot.sock", "e", SHAPE)
    tier = server.hub.tier
    for first in range(0, 40, 4):
        await asyncio.to_thread(produce, engine, "w", names(*range(first, first + 4)), SHAPE)
        await until(lambda before=first: tier.stats().written_pages >= before)  # type: ignore[misc]
    control_names = names(0, 9, 20, 33)
    await asyncio.to_thread(engine.match, control_names)
    await until(lambda: all(server.hub.index.complete(page) for page in control_names))
    assert await asyncio.to_thread(intact, engine, "r", control_names, SHAPE)
    engine.close()
    disk.close()
    await server.aclose()


async def test_what_is_in_the_way_is_refused_and_a_missing_disk_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("somebody's")
    with pytest.raises(StartError, match=r"disk\.path: .*taken exists; name a file"):
        open_disk(str(tmp_path / "taken"), PAGE)
    assert (tmp_path / "taken").read_text() == "somebody's"
    for path, size in ((tmp_path / "missing" / "kv", PAGE), (tmp_path / "large", 1 << 60)):
        disk = open_disk(str(path), size)
        assert isinstance(disk, NoDisk)
        assert disk.capacity == 0
        hub = Hub("here", memoryview(bytearray(PAGE)), KEY, time.monotonic, disk=disk)
        assert str(path) in hub.stats().disk.state
    (tmp_path / "left").touch()  # by a depot that was killed while it made its file
    disk = FileDisk(tmp_path / "left", PAGE)
    disk.close()
    assert os.listdir(tmp_path) == ["taken"]
