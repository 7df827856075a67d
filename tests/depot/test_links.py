"""Depots joined by real TLS connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from depot_kit import contract, intact, names, produce, until
from link_kit import SHAPE, World

from pdrelay.cluster import certs
from pdrelay.cluster.tls import client_context
from pdrelay.depot import wire
from pdrelay.depot.admission import Admissions
from pdrelay.depot.base import Delivered, LinkState, Stalled, Transfer
from pdrelay.depot.control_client import connect_control
from pdrelay.errors import DepotUnavailableError
from pdrelay.kv.contract import KVContract


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


@pytest.mark.parametrize("encryption", ["tls", "control"])
async def test_bytes_that_are_lost_behind_a_proxy_are_sent_again(
    world: World, encryption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdrelay.depot.tcp_lanes.UNANSWERED_LOOKS", 2)
    p, d = await world.site("p"), await world.site("d", clear=["p"] if encryption == "control" else [])
    line = await world.line(d)
    p.link("d", f"127.0.0.1:{d.listener.port}", line.address, encryption=encryption)
    await until(lambda: len(d.listener._receivers) == 2)
    line.silent = True  # the proxy has acknowledged them, so TCP is content
    prefill, pages = await p.engine("prefill"), names(1, 2, 3)
    await run(lambda: produce(prefill, "r", pages, SHAPE))
    p.hub.transfer(Transfer(xfer="x", names=pages, to="d"), "gateway")
    before = line.passed
    await until(lambda: line.passed >= before + 3 * SHAPE.page_bytes)
    line.silent = False
    await until(lambda: p.hub.senders.stats("x").delivered)
    assert p.hub.links.up() == {"d": True}
    p.hub.end("x")
    await run(lambda: prefill.release("r"))
    await until(lambda: p.idle() and d.idle())


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
    assert p.hub.links.up() == {"d": True}
    await control.end("x")
    await until(lambda: p.idle() and d.idle())


async def test_a_bit_that_flips_at_the_sender_never_arrives_and_its_page_is_produced_anew(world: World) -> None:
    p, d, _ = await world.joined()
    prefill, decode, control = await p.engine("prefill"), await d.engine("decode"), await p.control()
    pages = names(*range(5))
    await run(lambda: produce(prefill, "r", pages, SHAPE))
    await run(lambda: prefill.release("r"))
    damaged = p.hub.index.get(pages[3])
    assert damaged is not None
    prefill.arena[damaged.offset + 5000] ^= 16
    events = control.events()
    async with asyncio.timeout(20):
        await control.transfer(Transfer(xfer="x", names=pages, to="d"))
        while await anext(events) != Stalled("x", [pages[3]]):
            pass
        assert d.hub.index.match(pages) == 3
        await run(lambda: produce(prefill, "again", pages, SHAPE))
        while await anext(events) != Delivered("x"):
            pass
    await events.aclose()  # type: ignore[attr-defined]
    await run(lambda: pytest.fail("bytes differ") if not intact(decode, "r", pages, SHAPE) else None)
    assert (p.hub.stats().corrupt_pages, d.hub.stats().corrupt_pages) == (1, 0)
    await run(lambda: decode.release("r"))
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
    await until(lambda: p.hub.links.up().get("d") is False)
    q.link("p", address)  # it is d that answers
    await until(lambda: q.hub.links.up().get("p") is False)
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
    assert p.hub.links.up() == {"d": True}


async def test_a_peer_that_falls_silent_is_taken_for_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrelay.depot.keepalive.PING_SECONDS", 0.05)
    p, _, line = await world.joined()
    events: list[object] = []
    p.hub.subscribe(events.append)
    before = line.passed
    await until(lambda: line.passed > before + 1000)  # some pings and their answers
    assert events == [LinkState("d", True, path="tcp")]
    line.silent = True
    await until(lambda: p.hub.links.up() == {"d": False})
    line.silent = False
    await until(lambda: p.hub.links.up() == {"d": True})


async def test_a_failed_accept_is_not_the_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = Admissions._next, set[Admissions]()

    async def failing_once(admissions: Admissions) -> socket.socket:
        if admissions not in failed:
            failed.add(admissions)
            raise OSError(errno.EMFILE, "too many open files")
        return await accept(admissions)

    monkeypatch.setattr(Admissions, "_next", failing_once)
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
