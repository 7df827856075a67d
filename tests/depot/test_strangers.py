"""Who does not belong here gets nothing and costs nothing; who belongs and hangs is let go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest
from depot_kit import KEY, names, until
from link_kit import SHAPE, Site, World

from pdrelay.cluster.tls import client_context
from pdrelay.depot import admission, connection, link_messages, listener, receiving, wire
from pdrelay.depot.base import Forgotten, LinkState
from pdrelay.depot.hub import Hub
from pdrelay.depot.link_messages import BulkHello, LinkHello, Live, Offer
from pdrelay.depot.sockets import Streams, dial_bulk, dial_clear, dial_control, read_frame


def address(site: Site) -> str:
    return f"127.0.0.1:{site.listener.port}"


def hello(hub: Hub) -> LinkHello:
    return LinkHello(depot="p", key_check=Hub("p", memoryview(b""), KEY, lambda: 0.0).key_check, contracts=[])


async def peer_of(world: World, site: Site) -> Streams:
    """A control connection that has said hello as depot p, and no more."""
    reader, writer = await dial_control(address(site), client_context(world.tls, "p"), site.name)
    writer.write(wire.frame(hello(site.hub)))
    link_messages.decode_hello(await read_frame(reader))
    return reader, writer


async def connect(site: Site, *said: bytes) -> Streams:
    host, port = "127.0.0.1", site.listener.port
    reader, writer = await asyncio.open_connection(host, port)
    for data in said:
        writer.write(data)
    return reader, writer


async def refused(site: Site, streams: Streams) -> None:
    """The other side ends the connection without a word."""
    reader, writer = streams
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


@pytest.fixture
async def site(world: World) -> Site:
    return await world.site("d", clear=["q"])


@pytest.mark.parametrize("said", [b"X", b"P" + b"\x00\xff\xff\xff", b"P" + b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1"])
async def test_garbage_is_refused(site: Site, said: bytes) -> None:
    await refused(site, await connect(site, said))
    await until(lambda: site.listener.admissions.refused == 1 and site.listener.admissions.pending == 0)


@pytest.mark.parametrize("said", [b"", b"B", b"C", b"P", b"B\x16\x03\x01", b"P\x20\x00\x00\x00\x94"])
async def test_who_stops_in_the_middle_is_dropped_in_time(
    site: Site, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ADMIT_SECONDS", 0.2)
    await refused(site, await connect(site, said))
    await until(lambda: site.listener.admissions.pending == 0)


async def test_a_flood_costs_a_bounded_number_of_places_and_lets_others_in(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING", 8)
    flood = [await connect(site, b"B") for _ in range(40)]
    await until(lambda: site.listener.admissions.refused >= 32)
    assert site.listener.admissions.pending <= 8
    control = await site.control()
    assert (await control.stats()).transfers == 0
    for streams in flood:
        streams[1].close()


async def test_a_connection_that_was_only_just_accepted_is_closed_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as here:
        listening.setblocking(False)
        begun: list[socket.socket] = []

        async def admit(sock: socket.socket) -> None:
            begun.append(sock)

        admissions = admission.Admissions(listening, admit)
        here.connect(listening.getsockname())
        await until(lambda: bool(admissions.pending), step=0)
        await admissions.aclose()
        assert not begun
        here.settimeout(5)
        assert await asyncio.to_thread(here.recv, 1) == b""


async def test_a_bulk_connection_needs_its_depots_control_connection(world: World, site: Site) -> None:
    def dial() -> bytes:
        with dial_bulk(address(site), client_context(world.tls, "p"), "d") as sock:
            sock.sendall(wire.frame(BulkHello(depot="p")))
            return sock.recv(1)

    assert await asyncio.to_thread(dial) == b""


@pytest.mark.parametrize("secret", [b"", b"x" * 32])
async def test_a_connection_in_clear_needs_a_secret(world: World, site: Site, secret: bytes) -> None:
    reader, writer = await dial_control(address(site), client_context(world.tls, "q"), "d")
    key_check = Hub("q", memoryview(b""), KEY, lambda: 0.0).key_check
    writer.write(wire.frame(LinkHello(depot="q", key_check=key_check, contracts=[], encryption="control")))
    link_messages.decode_hello(await read_frame(reader))

    def dial(secret: bytes) -> bytes:
        with dial_clear(address(site)) as sock:
            sock.sendall(wire.frame(BulkHello(depot="q", secret=secret)))
            sock.settimeout(1.0)
            try:
                return sock.recv(1)
            except TimeoutError:
                return b"it stays open"

    assert await asyncio.to_thread(dial, secret) == b""
    writer.write(wire.frame(link_messages.AskSecrets(1)))
    answer = link_messages.decode(await read_frame(reader))
    while not isinstance(answer, link_messages.Secrets):
        answer = link_messages.decode(await read_frame(reader))
    assert await asyncio.to_thread(dial, answer.secrets[0]) == b"it stays open"
    assert await asyncio.to_thread(dial, answer.secrets[0]) == b"", "a secret is good for one connection"
    writer.close()


async def test_no_secrets_for_a_link_with_tls(world: World, site: Site) -> None:
    reader, writer = await peer_of(world, site)
    writer.write(wire.frame(link_messages.AskSecrets(1)))
    while not isinstance(answer := link_messages.decode(await read_frame(reader)), wire.Failure):
        pass
    assert "encryption 'tls'" in answer.args[0]
    writer.close()


async def test_a_connection_without_a_hello_is_cut(world: World, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.1)
    _, writer = await dial_control(address(site), client_context(world.tls, "p"), "d")
    await until(lambda: sum((cut["no hello"] for cut in site.hub.cut_connections), 0) == 1)
    writer.close()


async def test_a_hung_sender_does_not_keep_pins(world: World, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(connection, "SILENT_LOOKS", 20)
    monkeypatch.setattr(receiving, "LOST_PEER_SECONDS", 0.3)
    slow = await world.site("q")  # the looks of the listener above have begun with the other interval
    _, writer = await peer_of(world, slow)
    offer = Offer(
        xfer="x", names=names(1, 2), tails=0, addressee="", background=False, contract=SHAPE,
    )  # fmt: skip
    for message in (Live(["x"]), offer):
        writer.write(wire.frame(message))
    await until(lambda: slow.hub.stats().reserved == 2)
    await until(slow.idle)
    assert sum((cut["silent"] for cut in slow.hub.cut_connections), 0) == 1
    writer.close()


async def test_a_slow_reader_is_cut_with_a_reason_and_others_go_on(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT", 1 << 20)
    _, writer = await dial_control(address(site), client_context(world.tls, "gateway"), "d")
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a reading transport
    for message in (wire.Hello(kind="control", name="g", epoch="1"), wire.Tell(wire.Subscribe(1))):
        writer.write(wire.frame(message))
    control = await site.control()
    events = control.events()
    heard = asyncio.create_task(anext(events))
    await until(lambda: len(site.hub._subscribers) == 2)

    def cut() -> bool:
        for number in range(50):
            site.hub.emit(LinkState(f"elsewhere {number}", False, "x" * 20_000))
        return sum((cut["slow reader"] for cut in site.hub.cut_connections), 0) == 1

    await until(cut)
    assert isinstance(await heard, LinkState)
    assert (await control.stats()).transfers == 0
    writer.close()
    await events.aclose()


async def test_a_reader_of_events_that_falls_behind_starts_anew(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdrelay.depot.control_client.MAX_EVENTS", 100)
    control = await site.control()
    events = control.events()
    heard = asyncio.create_task(anext(events))
    await until(lambda: len(site.hub._subscribers) == 1)
    for number in range(300):
        site.hub.emit(LinkState("elsewhere", False, str(number)))
    await heard
    async with asyncio.timeout(10):
        while not isinstance(event := await anext(events), Forgotten):
            assert isinstance(event, LinkState)
    site.hub.links.state(LinkState("elsewhere", True))
    async with asyncio.timeout(10):
        while await anext(events) != LinkState("elsewhere", True):
            pass
    await events.aclose()


async def test_without_a_certificate_nothing_opens(world: World, site: Site) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(world.tls / "ca.pem")
    with socket.create_connection(("127.0.0.1", site.listener.port)) as raw:
        raw.sendall(b"C")

        def talk() -> bytes:
            with context.wrap_socket(raw, server_hostname="d") as sock:
                sock.sendall(wire.frame(hello(site.hub)))
                return sock.recv(1)

        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await asyncio.to_thread(talk) == b""
    assert not site.hub.receivers._send
