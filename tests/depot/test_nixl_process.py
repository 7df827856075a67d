"""`pdrelay depot` with links by NIXL: killed at either end, and refused where it cannot work."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from depot_kit import intact, names, produce, until, write_parts
from test_depot_process import CONFIG, SHAPE, Fleet, stats_when

from pdrelay.cluster.config import Deployment, load
from pdrelay.depot.arena import Arena
from pdrelay.depot.base import LinkState, PageKind, Transfer
from pdrelay.depot.control_client import ControlClient
from pdrelay.depot.engine_client import connect_engine
from pdrelay.depot.nixl.setup import require_nixl
from pdrelay.errors import StartError

LOOPBACK = 'UCX_TLS = "tcp", UCX_NET_DEVICES = "lo"'


def with_nixl(text: str, settings: str = f"nixl_env = {{ {LOOPBACK} }}") -> str:
    return text.replace('target = "west"', f'target = "west", transport = "nixl", {settings}')


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    fleet.config.write_text(with_nixl(fleet.config.read_text()))
    try:
        for depot in ("d", "p"):
            await fleet.start(depot)
        yield fleet
    finally:
        for depot in list(fleet.processes):
            await fleet.stop(depot, signal.SIGKILL)


async def path_of_link(control: ControlClient) -> str:
    async with asyncio.timeout(20):
        async for event in control.events():
            if isinstance(event, LinkState) and event.up:
                return event.path
    raise AssertionError


def children(fleet: Fleet, depot: str) -> list[int]:
    pid = fleet.processes[depot].pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_killed_depots_take_their_agents_along_and_come_back(fleet: Fleet) -> None:
    here, there = fleet.control("p"), fleet.control("d")
    await here.ready(10)
    await there.ready(10)
    assert await path_of_link(here) == "nixl UCX tcp/lo"
    pages = names(*range(8))
    prefill = await asyncio.to_thread(connect_engine, fleet.directory / "p.sock", "prefill", SHAPE)
    await here.transfer(Transfer(xfer="x", names=pages, to="d"))
    offsets = await asyncio.to_thread(prefill.reserve, "r", pages, [PageKind.PREFIX] * 8)
    for page, offset in zip(pages, offsets, strict=True):
        assert offset is not None
        await asyncio.to_thread(write_parts, prefill, "r", page, offset, SHAPE, range(3))
    await stats_when(there, "received_bytes", 3 * 8 * SHAPE.layouts[0].part_bytes)
    agents = children(fleet, "p")
    assert len(agents) == 1
    await fleet.stop("p", signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{agents[0]}").exists())
    prefill.close()

    await fleet.start("p")
    await here.ready(10)
    prefill = await asyncio.to_thread(connect_engine, fleet.directory / "p.sock", "prefill", SHAPE)
    await asyncio.to_thread(produce, prefill, "r", pages, SHAPE)
    decode = await asyncio.to_thread(connect_engine, fleet.directory / "d.sock", "decode", SHAPE)
    async with asyncio.timeout(30):
        await there.wait(pages)
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    decode.close()

    await fleet.stop("d", signal.SIGKILL)
    await fleet.start("d")
    await there.ready(10)
    decode = await asyncio.to_thread(connect_engine, fleet.directory / "d.sock", "decode", SHAPE)
    async with asyncio.timeout(30):
        await there.wait(pages)
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    await here.end("x")
    await stats_when(there, "transfers", 0)
    assert await fleet.stop("p") == 0
    assert await fleet.stop("d") == 0
    for part in (prefill, decode):
        part.close()
    await here.aclose()
    await there.aclose()


def deployment(directory: Path, settings: str) -> Deployment:
    path = directory / "pdrelay.toml"
    path.write_text(with_nixl(CONFIG.format(p=1, d=2, metrics=3), settings))
    return load(path)


BLOCKED = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
"""


async def refusal(deployment: Deployment) -> str:
    arena = Arena(1 << 20)
    try:
        with pytest.raises(StartError) as refused:
            await require_nixl(deployment, deployment.host_named("d"), arena.fd)
    finally:
        arena.close()
    return str(refused.value)


async def test_without_the_library_the_depot_does_not_start_and_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    detail = await refusal(deployment(tmp_path, f'nixl_env = {{ PYTHONPATH = "{path}" }}'))
    assert detail.startswith('link[0].transport: found "nixl", which does not work on host d: ')
    assert "is not installed" in detail
    assert "pip install 'pdrelay[nixl]'" in detail
    assert 'transport = "tcp"' in detail


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ('nixl_backend = "PIGEON"', "NIXL has no backend 'PIGEON' here, it has .*UCX"),
        ('nixl_env = { UCX_TLS = "rc" }', "NIXL's backend UCX does not start"),
    ],
)
async def test_a_backend_that_does_not_work_is_not_replaced_by_another(
    tmp_path: Path, settings: str, reason: str
) -> None:
    detail = await refusal(deployment(tmp_path, settings))
    assert detail.startswith("link[0].transport: ")
    assert re.search(reason, detail)
