"""`pdrelay depot` as an operator runs it: two processes, a killed sender, a clean end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from depot_kit import contract, intact, names, produce

from pdrelay.cli.main import main
from pdrelay.cluster import certs
from pdrelay.cluster.config import load
from pdrelay.cluster.tls import client_context
from pdrelay.depot.base import DepotStats, Transfer, Use
from pdrelay.depot.control_client import ControlClient, connect_control, control_over_unix
from pdrelay.depot.engine_client import connect_engine
from pdrelay.depot.process import link_codecs
from pdrelay.errors import DepotUnavailableError

SHAPE = contract()


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


CONFIG = """
fleet_key_file = "tls/fleet.key"
model = {{ name = "m", path = "m" }}
gateway = {{ cluster = "west" }}
tls = {{ directory = "tls" }}
instance = []
cluster = [{{ name = "east" }}, {{ name = "west" }}]
link = [{{ source = "east", target = "west" }}]

[[host]]
name = "p"
cluster = "east"
socket = "p.sock"
listen = "127.0.0.1:{p}"
arena = "1MiB"

[[host]]
name = "d"
cluster = "west"
socket = "d.sock"
listen = "127.0.0.1:{d}"
disk = {{ path = "kv", size = "1MiB" }}
metrics = "127.0.0.1:{metrics}"
arena = "1MiB"
"""


class Fleet:
    """Two depot processes, `p` linked to `d`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "pdrelay.toml"
        self.ports = dict(zip(["p", "d", "metrics"], free_ports(3), strict=True))
        self.processes: dict[str, Process] = {}
        certs.ensure(directory / "tls", ["p", "d", "gateway"])
        self.config.write_text(CONFIG.format(**self.ports))

    async def start(self, name: str) -> None:
        command = [sys.executable, "-m", "pdrelay.cli.main", "depot", "--config", str(self.config), "--name", name]
        self.processes[name] = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        output = self.processes[name].stdout
        assert output is not None
        async with asyncio.timeout(20):
            assert b"serves" in await output.readline()

    async def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        async with asyncio.timeout(20):
            await process.communicate()
        assert process.returncode is not None
        return process.returncode

    def control(self, name: str) -> ControlClient:
        return control_over_unix(str(self.directory / f"{name}.sock"))


def test_both_ends_take_the_codec_of_a_link_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pdrelay.toml"
    text = CONFIG.format(p=1, d=2, metrics=3).replace('target = "west"', 'target = "west", codec = "int8"')
    path.write_text(text)
    deployment = load(path)
    p, d = (link_codecs(deployment, deployment.host_named(name)) for name in "pd")
    assert (p.encoder("d").name, d.decoder("p").name) == ("int8", "int8")
    assert (d.encoder("p").name, p.decoder("d").name) == ("none", "none")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        for name in ("d", "p"):
            await fleet.start(name)
        yield fleet
    finally:
        for name in list(fleet.processes):
            await fleet.stop(name, signal.SIGKILL)


async def stats_when(control: ControlClient, field: str, value: int) -> DepotStats:
    async with asyncio.timeout(30):
        while getattr(stats := await control.stats(), field) != value:  # noqa: ASYNC110 - the depot tells nobody
            await asyncio.sleep(0.05)
    return stats


async def shown(fleet: Fleet, exit_code: int, *options: str) -> str:
    """What `pdrelay depot stats` prints."""
    arguments = ["depot", "stats", "--config", str(fleet.config), *options]
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert result.exit_code == exit_code, result.output
    return result.stdout


async def test_two_processes_transfer_and_end_without_a_trace(fleet: Fleet) -> None:
    there = connect_control(
        f"127.0.0.1:{fleet.ports['d']}", client_context(fleet.directory / "tls", "gateway"), server_name="d"
    )
    here = fleet.control("p")
    await there.ready(10)
    await here.ready(10)
    prefill = await asyncio.to_thread(connect_engine, fleet.directory / "p.sock", "prefill", SHAPE)
    decode = await asyncio.to_thread(connect_engine, fleet.directory / "d.sock", "decode", SHAPE)
    pages = names(*range(20))
    await here.transfer(Transfer(xfer="x", names=pages, to="d"))
    await asyncio.to_thread(produce, prefill, "r", pages, SHAPE)
    async with asyncio.timeout(20):
        await there.wait(pages)
    assert await asyncio.to_thread(intact, decode, "r", pages, SHAPE)
    await asyncio.to_thread(decode.release, "r")
    decode.report_use(Use(requests=1, own=60, arena=320, computed=20))
    await here.end("x")
    await stats_when(there, "transfers", 0)
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{fleet.ports['metrics']}/metrics")).text
    assert f'pdrelay_depot_received_bytes_total{{depot="d"}} {20 * SHAPE.page_bytes}' in text
    assert 'pdrelay_depot_pinned_pages{depot="d"} 0' in text
    assert 'pdrelay_depot_prompt_tokens_total{depot="d",instance="decode",source="arena"} 320' in text
    told = json.loads(await shown(fleet, 0, "--json"))
    assert told["d"]["stats"]["use"]["decode"] | {"arena": 320, "requests": 1} == told["d"]["stats"]["use"]["decode"]
    table = await shown(fleet, 0, "--host", "d")
    assert "decode" in table
    assert "80.0 %" in table
    assert re.search(r"^p +d +tcp\b", await shown(fleet, 0, "--host", "p"), re.MULTILINE)
    assert await fleet.stop("p") == 0
    assert await fleet.stop("d", signal.SIGINT) == 0
    assert "d: " in await shown(fleet, 1)
    assert not list(fleet.directory.glob("*.sock"))
    with pytest.raises(DepotUnavailableError):
        await asyncio.to_thread(decode.match, pages)
    for engine in (prefill, decode):
        engine.close()
    await here.aclose()
    await there.aclose()


async def test_a_killed_depot_comes_back_and_its_transfers_start_over(fleet: Fleet) -> None:
    here, there = fleet.control("p"), fleet.control("d")
    await here.ready(10)
    await there.ready(10)
    await here.transfer(Transfer(xfer="x", names=names(1, 2), to="d"))
    await stats_when(there, "transfers", 1)
    table = await shown(fleet, 0, "--host", "p")
    assert re.search(r"^p +x +d +\d+\.\d +0 B +\S+ B +2 +\d+\.\d +a request$", table, re.MULTILINE), table
    (told,) = json.loads(await shown(fleet, 0, "--host", "p", "--json"))["p"]["progress"]
    assert (told["xfer"], told["done"], told["absent"], told["delivered"]) == ("x", 0, 2, False)
    await fleet.stop("p", signal.SIGKILL)
    await fleet.start("p")
    await here.ready(10)
    prefill = await asyncio.to_thread(connect_engine, fleet.directory / "p.sock", "prefill", SHAPE)
    await asyncio.to_thread(produce, prefill, "r", names(1, 2), SHAPE)
    async with asyncio.timeout(30):
        await there.wait(names(1, 2))
    await here.end("x")
    await stats_when(there, "leases", 0)
    prefill.close()
    await here.aclose()
    await there.aclose()
