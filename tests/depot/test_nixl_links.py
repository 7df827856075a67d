"""Depots joined by NIXL agents: real processes, UCX over TCP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
from depot_kit import intact, name, names, produce, until, whole, write_parts
from link_kit import SHAPE, Site, World

from pdrelay.depot import link_messages as link
from pdrelay.depot.base import LinkState, PageKind, Transfer
from pdrelay.depot.inbox import Inbox, Landed
from pdrelay.depot.metrics import render
from pdrelay.depot.nixl.process import AgentProcess


async def run(work: Callable[[], object]) -> None:
    await asyncio.to_thread(work)


def linked(p: Site) -> bool:
    return p.hub.links.up().get("d", False)


async def joined(world: World, pages_there: int = 64) -> tuple[Site, Site]:
    p, d = await world.site("p"), await world.site("d", pages_there, writers=["p"])
    p.link("d", f"127.0.0.1:{d.listener.port}", nixl=True)
    await until(lambda: linked(p))
    return p, d


def send_signal(agent: AgentProcess, number: signal.Signals) -> None:
    assert agent._process is not None
    os.kill(agent._process.pid, number)


def under_way(p: Site) -> int:
    """Bytes that the depot gave to its agent and that are not known to be written."""
    lanes = p.hub.senders.peers["d"]._lanes  # type: ignore[attr-defined]
    return sum(batch.payload for batch in lanes._unwritten.values())


async def end(p: Site, d: Site, xfer: str = "x") -> None:
    """Everything comes back: pins, pages held for writes that may be under way, grants."""
    p.hub.end(xfer)
    await until(lambda: p.idle() and d.idle() and not len(d.hub.receivers.grants))


async def test_pages_are_written_into_the_far_arena_and_all_counters_return(world: World) -> None:
    p, d = await joined(world)
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    there = await d.control()
    pages = names(*range(40))
    p.hub.transfer(Transfer(xfer="x", names=pages, tails=1, to="d", addressee="decode"), "gateway")
    async with asyncio.timeout(20):
        waiting = asyncio.create_task(there.wait(pages, "decode"))
        await run(lambda: produce(prefill, "r", pages, SHAPE, tail=True))
        await waiting
    await run(lambda: pytest.fail("bytes differ") if not intact(decode, "r", pages, SHAPE) else None)
    await run(lambda: decode.release("r"))
    await run(lambda: prefill.release("r"))
    await until(lambda: p.hub.senders.stats("x").sent == 40 * SHAPE.page_bytes)
    await end(p, d)
    assert d.hub.stats().received_bytes == 40 * SHAPE.page_bytes
    assert d.hub.stats().corrupt_parts == 0
    assert 'pdrelay_depot_link_info{depot="p",to="d",transport="nixl",path="nixl UCX tcp/' in render(p.hub)


async def test_a_bit_that_flips_on_the_way_is_noticed_and_the_part_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = await joined(world)
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    check, flipped = Inbox.check, []

    def flip_once(inbox: Inbox, sender: str, run: link.Run, landed: list[Landed]) -> None:
        if not flipped:
            page = d.hub.index.get(run.name)
            assert page is not None
            flipped.append(run)
            d.arena.view[page.offset + run.first * run.part_bytes + 100] ^= 4
        check(inbox, sender, run, landed)

    monkeypatch.setattr(Inbox, "check", flip_once)
    pages = names(*range(10))
    await run(lambda: produce(prefill, "r", pages, SHAPE))
    p.hub.transfer(Transfer(xfer="x", names=pages, to="d"), "gateway")
    await until(lambda: p.hub.senders.stats("x").delivered)
    assert d.hub.stats().corrupt_parts == 1
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    await run(lambda: decode.release("r"))
    await end(p, d)


@pytest.mark.parametrize("victim", ["p", "d"])
async def test_an_agent_that_dies_in_the_middle_costs_only_a_new_conversation(world: World, victim: str) -> None:
    p, d = await joined(world)
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    pages, agent = names(*range(60)), (p if victim == "p" else d).agents[0]
    await run(lambda: produce(prefill, "r", pages[:30], SHAPE))
    p.hub.transfer(Transfer(xfer="x", names=pages, to="d"), "gateway")
    await until(lambda: p.hub.senders.stats("x").sent == 30 * SHAPE.page_bytes)
    send_signal(agent, signal.SIGSTOP)
    await run(lambda: produce(prefill, "r", pages[30:], SHAPE))
    await until(lambda: bool(under_way(p)))
    send_signal(agent, signal.SIGKILL)
    await until(lambda: p.hub.senders.stats("x").delivered, 30)
    assert len(p.agents) == len(d.agents) == 2
    assert d.hub.stats().received_bytes == 60 * SHAPE.page_bytes, "only what was missing came after that"
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    assert d.hub.stats().corrupt_parts == 0
    await run(lambda: decode.release("r"))
    await end(p, d)


async def test_room_of_a_page_given_up_is_not_used_while_a_write_to_it_may_come(world: World) -> None:
    p, d = await joined(world, pages_there=4)
    prefill, decode = await p.engine("prefill"), await d.engine("decode")
    await run(lambda: produce(prefill, "r", names(1, 2, 3), SHAPE))
    send_signal(p.agents[0], signal.SIGSTOP)
    p.hub.transfer(Transfer(xfer="x", names=names(1, 2, 3), to="d"), "gateway")
    await until(lambda: under_way(p) == 3 * SHAPE.page_bytes)
    p.hub.end("x")
    await until(lambda: not d.hub.stats().reserved)
    assert len(d.hub.receivers.grants) == 3
    await run(lambda: produce(decode, "fits", names(4), SHAPE))
    await run(lambda: decode.lease("fits", names(4)))
    waits = d.hub.stats().reserve_waits
    p.hub.transfer(Transfer(xfer="y", names=names(3), to="d"), "gateway")
    await until(lambda: d.hub.stats().reserve_waits > waits)
    send_signal(p.agents[0], signal.SIGCONT)
    await until(lambda: p.hub.senders.stats("y").delivered)
    assert await asyncio.to_thread(intact, decode, "fits", names(4), SHAPE)
    assert await asyncio.to_thread(intact, decode, "r", names(3), SHAPE)
    await run(lambda: decode.release("r"))
    await run(lambda: decode.release("fits"))
    await end(p, d, "y")
    assert len(p.agents) == 1, "all in one conversation"


async def test_a_page_produced_anew_gets_other_room_than_its_first_parts(world: World) -> None:
    p, d = await joined(world)
    prefill = await p.engine("prefill")
    await d.engine("decode")
    p.hub.transfer(Transfer(xfer="x", names=names(1), to="d"), "gateway")
    [at] = await asyncio.to_thread(prefill.reserve, "a", names(1), [PageKind.PREFIX])
    assert at is not None
    await run(lambda: write_parts(prefill, "a", name(1), at, SHAPE, range(2)))
    await until(lambda: d.hub.receivers.received_bytes == 2 * SHAPE.layouts[0].part_bytes)
    first = d.hub.index.get(name(1))
    await run(lambda: prefill.release("a"))
    [at] = await asyncio.to_thread(prefill.reserve, "b", names(1), [PageKind.PREFIX])
    await run(lambda: write_parts(prefill, "b", name(1), at, SHAPE, range(4), production=1))
    await until(lambda: p.hub.senders.stats("x").delivered)
    second = d.hub.index.get(name(1))
    assert first is not None
    assert second is not None
    assert second is not first
    assert bytes(d.arena.view[second.offset : second.offset + SHAPE.page_bytes]) == whole(name(1), SHAPE, 1)
    await run(lambda: prefill.release("b"))
    await end(p, d)


async def test_nixl_at_one_end_only_is_refused_with_both_values(world: World) -> None:
    p, d = await world.site("p"), await world.site("d")
    states: list[LinkState] = []
    p.hub.subscribe(lambda event: states.append(event) if isinstance(event, LinkState) else None)
    p.link("d", f"127.0.0.1:{d.listener.port}", nixl=True)
    await until(lambda: bool(states))
    assert not states[0].up
    assert "link.transport: 'nixl' here, 'tcp' there" in states[0].detail or (
        "link.transport: 'tcp' here, 'nixl' there" in states[0].detail
    )
    assert not p.agents
    assert not d.agents
