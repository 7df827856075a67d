"""Whatever breaks, a transfer ends complete and intact or cleanly failed, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from depot_kit import names, production_of, until, write_parts
from fault_line import FaultLine
from fault_rig import Encryption, Rig
from link_kit import SHAPE, Site

from pdrelay.depot.base import LinkState, PageKind, Transfer
from pdrelay.depot.engine_client import SocketEngineDepot


async def play(tmp_path: Path, tls: Path, encryption: Encryption, seed: int, faults: int, pause: float) -> Counter[str]:
    print(f"seed {seed}")  # pytest shows it when the test fails
    async with Rig(tmp_path, tls, seed, encryption).running() as rig:
        await rig.warm()
        start = rig.leaks()
        await rig.play(faults, pause)
        await rig.up()
        await rig.settled(start)
        print(rig.ended)
        return rig.ended


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed within a second, so that a fault costs no more."""
    monkeypatch.setattr("pdrelay.depot.keepalive.PING_SECONDS", 0.3)
    monkeypatch.setattr("pdrelay.depot.listener.LOOK_SECONDS", 0.1)
    monkeypatch.setattr("pdrelay.depot.link.CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("pdrelay.depot.sockets.CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("pdrelay.depot.tcp_lanes.UNANSWERED_LOOKS", 8)
    monkeypatch.setattr("pdrelay.depot.tcp_lanes.CONNECT_SECONDS", 2.0)
    monkeypatch.setattr("pdrelay.depot.admission.ADMIT_SECONDS", 2.0)
    monkeypatch.setattr("pdrelay.depot.listener.ADMIT_SECONDS", 2.0)
    monkeypatch.setattr("pdrelay.depot.link.MAX_BACKOFF", 0.3)
    monkeypatch.setattr("pdrelay.depot.bulk_sender.MAX_BACKOFF", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("encryption", ["tls", "control"])
async def test_transfers_survive_faults(tmp_path: Path, tls: Path, encryption: Encryption) -> None:
    ended = await play(tmp_path, tls, encryption, random.randrange(1 << 32), faults=60, pause=0.15)
    assert ended["delivered"] > 20


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("encryption", ["tls", "control"])
async def test_transfers_survive_very_many_faults(tmp_path: Path, tls: Path, encryption: Encryption) -> None:
    ended = await play(tmp_path, tls, encryption, random.randrange(1 << 32), faults=500, pause=0.15)
    assert ended["delivered"] > 200


async def test_many_transfers_over_a_long_line_are_not_given_up(tmp_path: Path, tls: Path) -> None:
    """Nothing but time passes: no link goes down, nothing is sent twice."""
    many, each = 64, 2
    async with AsyncExitStack() as stack:
        p, d = (Site(name, stack, tmp_path, tls, many * each) for name in "pd")
        await p.start()
        await d.start()
        line = FaultLine(d.listener.port, random.Random(0))
        await line.start(3e6, 0.2)
        stack.push_async_callback(line.aclose)
        p.link("d", line.control, line.bulk, connections=4, rate=3e6, rtt=0.2)
        await until(lambda: p.hub.links.up().get("d", False))
        states: list[LinkState] = []
        p.hub.subscribe(lambda event: states.append(event) if isinstance(event, LinkState) else None)
        states.clear()  # as it is
        prefill = await p.engine("prefill")
        pages = [names(*range(number * each, number * each + each)) for number in range(many)]
        for number, own in enumerate(pages):
            p.hub.transfer(Transfer(xfer=f"x{number}", names=own, to="d"), "gateway")
        await asyncio.to_thread(_write_all, prefill, [page for own in pages for page in own])
        await until(lambda: all(p.hub.senders.stats(f"x{number}").delivered for number in range(many)), 60)
        payload = many * each * SHAPE.page_bytes
        assert all(_production_at(d, page) == 7 for own in pages for page in own)
        assert states == []
        await until(lambda: p.hub.stats().sent_bytes >= payload)
        assert (p.hub.stats().sent_bytes, d.hub.stats().received_bytes) == (payload, payload)
        for number in range(many):
            p.hub.end(f"x{number}")
        await asyncio.to_thread(prefill.release, "r")
        await until(lambda: p.idle() and d.idle())


def _write_all(engine: SocketEngineDepot, pages: list[bytes]) -> None:
    for page, offset in zip(pages, engine.reserve("r", pages, [PageKind.PREFIX] * len(pages)), strict=True):
        assert offset is not None
        write_parts(engine, "r", page, offset, SHAPE, range(SHAPE.layout_of(page).parts), 7)


def _production_at(site: Site, page: bytes) -> int | None:
    copy = site.hub.index.get(page)
    return production_of(site.hub, page, copy.offset, SHAPE) if copy is not None else None
