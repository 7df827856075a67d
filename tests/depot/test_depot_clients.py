"""Engines and gateways against a real server over its Unix socket; each test also runs on the in-memory twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from depot_kit import KEY, PART_BYTES, RunningDepot, contract, intact, name, names, produce, until, write_parts

from pdrelay.depot import wire
from pdrelay.depot.base import DepotControl, EngineDepot, Forgotten, PageKind, Removed, Stored, Transfer
from pdrelay.depot.checksums import unpack_checksums, wrong_parts
from pdrelay.depot.control_client import control_over_unix
from pdrelay.depot.engine_client import connect_engine
from pdrelay.depot.memory import MemoryDepot
from pdrelay.errors import ArenaFullError, ContractError, DepotError, DepotUnavailableError
from pdrelay.kv.contract import KVContract

SHAPE = contract()
PREFIX, TRANSFER = PageKind.PREFIX, PageKind.TRANSFER


class Clients:
    """Makes clients of one kind and closes them."""

    def __init__(self, engine: Callable[[str, KVContract], EngineDepot], control: Callable[[], DepotControl]) -> None:
        self._engine, self._control = engine, control
        self._engines: list[EngineDepot] = []
        self._controls: list[DepotControl] = []

    async def engine(self, instance: str = "e", shape: KVContract = SHAPE) -> EngineDepot:
        self._engines.append(await asyncio.to_thread(self._engine, instance, shape))
        return self._engines[-1]

    async def control(self) -> DepotControl:
        self._controls.append(self._control())
        await self._controls[-1].ready(5)  # type: ignore[attr-defined]
        return self._controls[-1]

    async def aclose(self) -> None:
        for engine in self._engines:
            engine.close()
        for control in self._controls:
            await control.aclose()


@pytest.fixture(params=["socket", "memory"])
async def clients(request: pytest.FixtureRequest, depot: RunningDepot) -> AsyncIterator[Clients]:
    if request.param == "socket":
        path = str(depot.socket_path)
        made = Clients(lambda i, c: connect_engine(path, i, c), lambda: control_over_unix(path))
    else:
        memory = MemoryDepot("here", 64 * SHAPE.page_bytes, KEY)
        made = Clients(memory.engine, memory.control)
    yield made
    await made.aclose()


async def run(work: Callable[[], object]) -> None:
    await asyncio.to_thread(work)


async def test_pages_travel_from_engine_to_engine(clients: Clients) -> None:
    writer, reader = await clients.engine("p"), await clients.engine("d")
    pages = names(1, 2, 3)

    def work() -> None:
        produce(writer, "r1", pages, SHAPE, tail=True)
        assert reader.match(pages) == 3
        assert intact(reader, "r1", pages, SHAPE)
        writer.release("r1")
        assert reader.match(pages) == 3
        reader.release("r1")
        assert reader.match(pages) == 2, "the transfer page went with its last pin"
        assert reader.fleet_key == KEY

    await run(work)


async def test_connections_of_an_instance_share_owners_which_end_with_the_first_that_named_them(
    clients: Clients,
) -> None:
    scheduler, worker, control = await clients.engine("p"), await clients.engine("p"), await clients.control()

    def work() -> None:
        scheduler.reserve("r1", names(1), [PREFIX])
        write_parts(worker, "r1", name(1), 0, SHAPE, range(2))
        worker.release("r1")
        assert scheduler.match(names(1)) == 0
        scheduler.reserve("r2", names(2), [PREFIX])
        worker.reserve("r2", names(3), [PREFIX])
        scheduler.close()
        while worker.reserve("r3", names(2, 3), [PREFIX, PREFIX]).count(None):
            worker.release("r3")
        worker.release("r3")

    await run(work)
    stats = await control.stats()
    assert (stats.reserved, stats.pages) == (0, 0)
    assert stats.used_bytes == 2 * SHAPE.page_bytes, "the worker may still write what the scheduler reserved"
    await run(lambda: worker.release("r2"))
    stats = await control.stats()
    assert (stats.leases, stats.used_bytes) == (0, 0)


async def test_equal_owner_names_of_two_engines_are_two_owners(clients: Clients) -> None:
    one, two = await clients.engine("one"), await clients.engine("two")

    def work() -> None:
        one.reserve("r", names(1), [PREFIX])
        two.release("r")
        assert two.reserve("r", names(1), [PREFIX]) == [None]

    await run(work)


async def test_what_one_reader_finds_corrupt_nobody_gets_any_more(clients: Clients) -> None:
    writer, one, two, control = *[await clients.engine(e) for e in ("p", "d1", "d2")], await clients.control()

    def work() -> None:
        produce(writer, "w", names(1, 2, 3), SHAPE)
        writer.release("w")
        (_, page, _), _ = one.lease("r", names(1, 2, 3)).pages, two.lease("r", names(1, 2, 3))
        one.arena[page.offset + PART_BYTES] ^= 1
        data = one.arena[page.offset : page.offset + SHAPE.page_bytes]
        assert wrong_parts(data, unpack_checksums(page.checksums)) == 0b10
        one.corrupt("r", names(2))
        assert (one.match(names(1, 2, 3)), two.match(names(2))) == (1, 0)
        produce(writer, "w", names(2), SHAPE)
        two.corrupt("r", names(2))  # it read the former copy, too
        assert two.match(names(1, 2, 3)) == 3
        assert intact(two, "again", names(1, 2, 3), SHAPE)
        one.release("r")
        two.release("r")
        two.release("again")

    await run(work)
    stats = await control.stats()
    assert (stats.corrupt_pages, stats.pages, stats.leases, stats.used_bytes) == (1, 3, 0, 3 * SHAPE.page_bytes)


async def test_a_full_arena_says_what_is_missing(clients: Clients) -> None:
    engine = await clients.engine()

    def work() -> None:
        with pytest.raises(ArenaFullError) as error:
            engine.reserve("r", names(*range(65)), [PREFIX] * 65)
        assert (error.value.needed, error.value.hopeless) == (65 * SHAPE.page_bytes, True)

    await run(work)


async def test_engines_of_one_model_must_agree(clients: Clients) -> None:
    first = await clients.engine("p")
    await run(lambda: produce(first, "r", names(1), SHAPE))
    with pytest.raises(ContractError) as error:
        await clients.engine("d", contract(dtype="bfloat16"))
    assert (error.value.field, error.value.ours, error.value.theirs) == ("groups[0].dtype", "float32", "bfloat16")
    await clients.engine("d", contract(model="another", dtype="bfloat16"))
    first.close()
    deadline = asyncio.get_running_loop().time() + 5
    while asyncio.get_running_loop().time() < deadline:
        try:
            changed = await clients.engine("d", contract(dtype="bfloat16"))
            break
        except ContractError:
            await asyncio.sleep(0.01)
    await run(lambda: pytest.fail("old pages stayed") if changed.match(names(1)) else None)


async def test_wait_ends_when_pages_are_complete_here_or_held_by_the_engine(clients: Clients) -> None:
    engine, control = await clients.engine("d"), await clients.control()
    await run(lambda: engine.report_held(names(1, 2), []))
    await run(lambda: engine.match([]))
    waiting = asyncio.create_task(control.wait(names(1, 2, 3), "d"))
    stranger = asyncio.create_task(control.wait(names(1, 3)))
    await run(lambda: engine.report_held([], names(2)))
    await run(lambda: produce(engine, "r", names(3), SHAPE))
    done, _ = await asyncio.wait([stranger], timeout=0.05)
    assert not done
    await run(lambda: produce(engine, "r", names(2), SHAPE))
    async with asyncio.timeout(5):
        await waiting
    stranger.cancel()
    await asyncio.gather(stranger, return_exceptions=True)
    await run(lambda: produce(engine, "r", names(1), SHAPE))
    async with asyncio.timeout(5):
        await control.wait(names(1, 2, 3))


async def test_events_open_with_the_present_and_follow_changes(clients: Clients) -> None:
    engine, control = await clients.engine("d"), await clients.control()
    await run(lambda: produce(engine, "r", names(1), SHAPE))
    await run(lambda: engine.report_held(names(9), []))
    await run(lambda: engine.match([]))
    events = control.events()
    async with asyncio.timeout(5):
        assert await anext(events) == Stored("here", names(1))
        assert await anext(events) == Stored("d", names(9))
        await control.transfer(Transfer(xfer="x", names=names(2), tails=1))
        await run(lambda: produce(engine, "t", names(2), SHAPE, tail=True))
        assert await anext(events) == Stored("here", names(2))
        await run(lambda: engine.release("t"))
        await control.end("x")
        assert await anext(events) == Removed("here", names(2))
        await run(engine.close)
        assert await anext(events) == Forgotten("d")
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_local_transfer_pins_what_is_still_to_come(clients: Clients) -> None:
    engine, control = await clients.engine("p"), await clients.control()
    await control.transfer(Transfer(xfer="x", names=names(1, 2), tails=1))
    await run(lambda: produce(engine, "r", names(1, 2), SHAPE, tail=True))
    await run(lambda: engine.release("r"))
    await control.wait(names(1, 2))
    assert (await control.stats()).pinned == 2
    await control.end("x")
    await control.end("x")
    stats = await control.stats()
    assert (stats.pinned, stats.leases, stats.transfers, stats.pages) == (0, 0, 0, 1)
    with pytest.raises(DepotError, match="no link to depot 'mars'"):
        await control.transfer(Transfer(xfer="y", names=[], to="mars"))


async def test_transfers_end_with_a_gateway_that_leaves(clients: Clients) -> None:
    leaving, staying = await clients.control(), await clients.control()
    await leaving.transfer(Transfer(xfer="x", names=names(1)))
    await leaving.aclose()
    async with asyncio.timeout(5):
        while (await staying.stats()).transfers:  # noqa: ASYNC110 - the depot tells nobody
            await asyncio.sleep(0.005)


async def test_a_gateway_reconnects_and_hears_everything_anew(depot: RunningDepot) -> None:
    engine = await asyncio.to_thread(connect_engine, depot.socket_path, "p", SHAPE)
    control = control_over_unix(str(depot.socket_path))
    await control.ready(5)
    await run(lambda: produce(engine, "r", names(1), SHAPE))
    await run(lambda: engine.match([]))
    await control.transfer(Transfer(xfer="x", names=names(1)))
    events = control.events()
    async with asyncio.timeout(10):
        assert await anext(events) == Stored("here", names(1))
        waiting = asyncio.create_task(control.wait(names(5)))
        await until(lambda: len(depot.hub.waiters) == 1)
        for connection in list(depot.server.connections.open):
            connection.close()
        with pytest.raises(DepotUnavailableError):
            await waiting
        assert await anext(events) == Forgotten("here")
        assert await anext(events) == Stored("here", names(1))
        assert (await control.stats()).transfers == 1, "the transfer outlived the connection"
    with pytest.raises(DepotUnavailableError):
        await run(lambda: engine.match(names(1)))
    engine.close()
    await events.aclose()  # type: ignore[attr-defined]
    await control.aclose()


async def test_what_a_gateway_ended_while_it_was_cut_off_ends_when_it_is_back(depot: RunningDepot) -> None:
    control = control_over_unix(str(depot.socket_path))
    await control.ready(5)
    for xfer in ("ended", "demoted", "lives"):
        await control.transfer(Transfer(xfer=xfer, names=names(1)))
    for connection in list(depot.server.connections.open):
        connection.close()
    await until(lambda: bool(control.trouble))
    for call in (control.end("ended"), control.demote("demoted")):
        with pytest.raises(DepotUnavailableError):
            await call
    await control.ready(5)
    assert (await control.stats()).transfers == 1
    await control.aclose()


async def test_a_depot_that_falls_silent_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pdrelay.depot.keepalive.PING_SECONDS", 0.05)

    async def welcome_and_no_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.Welcome(wire.VERSIONS, "stuck", b"k" * 32, "e")))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(welcome_and_no_more, str(tmp_path / "s")):
        control = control_over_unix(str(tmp_path / "s"))
        await control.ready(5)
        async with asyncio.timeout(5):
            with pytest.raises(DepotUnavailableError, match="no answer"):
                await control.stats()
        await control.aclose()


async def test_no_depot_is_a_clear_error() -> None:
    with pytest.raises(DepotUnavailableError, match="no depot at /nowhere"):
        connect_engine("/nowhere", "p", SHAPE)
    control = control_over_unix("/nowhere")
    with pytest.raises(DepotUnavailableError):
        await control.stats()
    await control.aclose()
