"""Depots joined by real TLS connections, with a line between them that can be cut."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from depot_kit import KEY, contract, intact, names, produce, until

from pdrelay.cluster import certs
from pdrelay.cluster.tls import client_context, server_context
from pdrelay.depot import wire
from pdrelay.depot.arena import Arena
from pdrelay.depot.base import LinkState, Transfer
from pdrelay.depot.control_client import ControlClient, connect_control
from pdrelay.depot.engine_client import SocketEngineDepot, connect_engine
from pdrelay.depot.hub import Hub
from pdrelay.depot.link import DepotLink, Route
from pdrelay.depot.listener import TlsListener
from pdrelay.depot.server import DepotServer
from pdrelay.errors import DepotUnavailableError
from pdrelay.kv.contract import KVContract

SHAPE = contract(part_bytes=24 << 10)


class Line:
    """Forwards TCP connections to `port`, until cut; counts what passes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.passed = 0
        self.cut_after: int | None = None  # bytes
        self.silent = False  # swallows everything
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, onward}
        for source, sink in ((reader, onward), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                self.passed += len(data)
                if self.cut_after is not None and self.passed > self.cut_after:
                    self.cut_after = None
                    self.cut()
                if not self.silent:
                    writer.write(data)
                    await writer.drain()
        writer.close()
        self._writers.discard(writer)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)


class Site:
    """A depot with all its listeners, in this process."""

    def __init__(self, name: str, stack: AsyncExitStack, tmp_path: Path, tls: Path, pages: int) -> None:
        self.name, self.socket, self.tls, self._stack = name, tmp_path / f"{name}.sock", tls, stack
        arena = Arena(pages * SHAPE.page_bytes)
        self.hub = Hub(name, arena.view, KEY, time.monotonic, epoch_base=time.time_ns() >> 10)
        self._server = DepotServer(self.hub, arena)
        self.listener = TlsListener(self.hub, "127.0.0.1:0", server_context(tls, name))

    async def start(self) -> None:
        self._stack.push_async_callback(self._server.aclose)
        self._stack.push_async_callback(self.listener.aclose)
        await self._server.start(self.socket)

    def link(self, to: str, control: str, bulk: str | None = None, *, tls: Path | None = None) -> DepotLink:
        link = DepotLink(
            self.hub,
            Route(to, control, bulk or control, connections=2, rate=1e9, rtt=1e-3),
            client_context(tls or self.tls, self.name),
        )
        self._stack.push_async_callback(link.aclose)
        return link

    async def engine(self, instance: str, shape: KVContract = SHAPE) -> SocketEngineDepot:
        engine = await asyncio.to_thread(connect_engine, self.socket, instance, shape)
        self._stack.callback(engine.close)
        return engine

    async def control(self) -> ControlClient:
        address = f"127.0.0.1:{self.listener.port}"
        control = connect_control(address, client_context(self.tls, "gateway"), self.name)
        self._stack.push_async_callback(control.aclose)
        await control.ready(5)
        return control

    def idle(self) -> bool:
        stats = self.hub.stats()
        users = sum(page.users for page in self.hub.index)
        return (stats.reserved, stats.pinned, stats.leases, stats.transfers, users) == (0, 0, 0, 0, 0)


class World:
    def __init__(self, stack: AsyncExitStack, tmp_path: Path, tls: Path) -> None:
        self.stack, self.tmp_path, self.tls = stack, tmp_path, tls

    async def site(self, name: str, pages: int = 64) -> Site:
        site = Site(name, self.stack, self.tmp_path, self.tls, pages)
        await site.start()
        return site

    async def line(self, to: Site) -> Line:
        line = Line(to.listener.port)
        await line.start()
        self.stack.push_async_callback(line.aclose)
        return line

    async def joined(self, pages_there: int = 64) -> tuple[Site, Site, Line]:
        p, d = await self.site("p"), await self.site("d", pages_there)
        line = await self.line(d)
        p.link("d", line.address)
        await until(lambda: p.hub.links_up().get("d", False))
        return p, d, line


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    certs.ensure(directory, ["p", "d", "q", "gateway"])
    return directory


@pytest.fixture
async def world(tmp_path: Path, tls: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack, tmp_path, tls)


async def run(work: Callable[[], object]) -> None:
    await asyncio.to_thread(work)


async def test_pages_cross_a_tls_link_and_all_counters_return(world: World) -> None:
    p, d, _ = await world.joined()
    prefill, decode, control = await p.engine("prefill"), await d.engine("decode"), await p.control()
    there = await d.control()
    pages = names(*range(40))
    await control.transfer(Transfer(xfer="x", names=pages, tails=1, to="d", addressee="decode"))
    async with asyncio.timeout(20):
        waiting = asyncio.create_task(there.wait(pages, "decode"))
        await run(lambda: produce(prefill, "r", pages, SHAPE, tail=True))
        await waiting
    await run(lambda: pytest.fail("bytes differ") if not intact(decode, "r", pages, SHAPE) else None)
    await run(lambda: decode.release("r"))
    await run(lambda: prefill.release("r"))
    await until(lambda: p.hub.senders.stats("x").delivered)
    await until(lambda: p.hub.senders.stats("x").sent == 40 * SHAPE.page_bytes)
    await control.end("x")
    await until(lambda: p.idle() and d.idle())
    assert (await there.stats()).received_bytes == 40 * SHAPE.page_bytes


async def test_a_line_that_breaks_in_the_middle_costs_only_what_was_under_way(world: World) -> None:
    p, d, line = await world.joined()
    prefill, decode, control = await p.engine("prefill"), await d.engine("decode"), await p.control()
    pages = names(*range(60))
    await run(lambda: produce(prefill, "r", pages, SHAPE))
    line.cut_after = line.passed + 2_000_000
    await control.transfer(Transfer(xfer="x", names=pages, to="d"))
    await until(lambda: p.hub.senders.stats("x").delivered, 20)
    assert line.cut_after is None
    await run(lambda: pytest.fail("bytes differ") if not intact(decode, "r", pages, SHAPE) else None)
    await run(lambda: decode.release("r"))
    await control.end("x")
    await until(lambda: p.idle() and d.idle())
    assert d.hub.stats().corrupt_parts == 0


async def test_one_broken_bulk_connection_does_not_take_the_link_down(world: World) -> None:
    p, d = await world.site("p"), await world.site("d")
    line = await world.line(d)
    p.link("d", f"127.0.0.1:{d.listener.port}", line.address)
    prefill, control = await p.engine("prefill"), await p.control()
    await d.engine("decode")
    pages = names(*range(60))
    await run(lambda: produce(prefill, "r", pages, SHAPE))
    line.cut_after = 2_000_000
    await control.transfer(Transfer(xfer="x", names=pages, to="d"))
    await until(lambda: p.hub.senders.stats("x").delivered, 20)
    assert line.cut_after is None
    assert p.hub.links_up() == {"d": True}
    await control.end("x")
    await until(lambda: p.idle() and d.idle())


async def test_a_receiver_without_room_is_waited_for(world: World) -> None:
    p, d, _ = await world.joined(pages_there=4)
    prefill, decode, control = await p.engine("prefill"), await d.engine("decode"), await p.control()
    await run(lambda: produce(decode, "busy", names(90, 91, 92), SHAPE))
    await run(lambda: decode.lease("busy", names(90, 91, 92)))
    await run(lambda: produce(prefill, "r", names(1, 2, 3), SHAPE))
    await control.transfer(Transfer(xfer="x", names=names(1, 2, 3), to="d"))
    await until(lambda: d.hub.stats().reserve_waits > 0)
    await run(lambda: decode.release("busy"))
    await until(lambda: p.hub.senders.stats("x").delivered)
    await control.end("x")
    await until(lambda: p.idle() and d.idle())


async def test_a_refused_contract_names_field_and_both_values(world: World) -> None:
    p, d = await world.site("p"), await world.site("d")
    await p.engine("prefill")
    await d.engine("decode", contract(part_bytes=24 << 10, dtype="bfloat16"))
    p.link("d", f"127.0.0.1:{d.listener.port}")
    control = await p.control()
    async with asyncio.timeout(10):
        async for event in control.events():
            detail = getattr(event, "detail", "")
            if "dtype" in detail:
                break
    assert "bfloat16" in detail
    assert "float32" in detail
    assert not d.hub.receivers._send


async def test_a_peer_of_another_authority_or_name_is_refused(world: World, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    certs.ensure(stranger, ["p", "q", "gateway"])
    d, p, q = await world.site("d"), await world.site("p"), await world.site("q")
    address = f"127.0.0.1:{d.listener.port}"
    p.link("d", address, tls=stranger)
    await until(lambda: p.hub.links_up().get("d") is False)
    q.link("p", address)  # it is d that answers
    await until(lambda: q.hub.links_up().get("p") is False)
    control = connect_control(address, client_context(stranger, "gateway"), "d")
    with pytest.raises(DepotUnavailableError):
        await control.ready(0.5)
    await control.aclose()
    assert not d.hub.receivers._send


async def test_garbage_does_no_harm(world: World) -> None:
    p, d, _ = await world.joined()
    for data in (b"X", b"C" + b"\x00" * 500, b"B" + b"\xff" * 500, b""):
        with socket.create_connection(("127.0.0.1", d.listener.port)) as sock:
            sock.sendall(data)
    control = await d.control()
    assert (await control.stats()).transfers == 0
    assert p.hub.links_up() == {"d": True}


async def test_a_peer_that_falls_silent_is_taken_for_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrelay.depot.keepalive.PING_SECONDS", 0.05)
    p, _, line = await world.joined()
    events: list[object] = []
    p.hub.subscribe(events.append)
    before = line.passed
    await until(lambda: line.passed > before + 1000)  # some pings and their answers
    assert events == [LinkState("d", True)]
    line.silent = True
    await until(lambda: p.hub.links_up() == {"d": False})
    line.silent = False
    await until(lambda: p.hub.links_up() == {"d": True})


async def test_a_failed_accept_is_not_the_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    accept, failed = loop.sock_accept, set[socket.socket]()

    async def failing_once(sock: socket.socket) -> tuple[socket.socket, object]:
        if sock not in failed:
            failed.add(sock)
            raise OSError(errno.EMFILE, "too many open files")
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", failing_once)
    await world.joined()


async def test_an_engine_that_leaves_before_its_welcome_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await world.site("p")
    join, joined = site.hub.engine_joins, asyncio.Event()

    def noted(instance: str, shape: KVContract) -> int:
        joined.set()
        return join(instance, shape)

    monkeypatch.setattr(site.hub, "engine_joins", noted)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(site.socket))
        sock.sendall(wire.frame(wire.Hello(kind="engine", name="e", epoch="1", contract=SHAPE)))
    await asyncio.wait_for(joined.wait(), 5)
    await until(lambda: not site.hub.own_contracts)
