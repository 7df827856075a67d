"""The gateways that are compared: ours with its depots, and routers behind scripts in benchmarks/peers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from pdrelay.bench.children import Child, output_of, started
from pdrelay.bench.relay.load import Result, Task
from pdrelay.cluster import certs
from pdrelay.cluster.config import GATEWAY
from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.units import parse_address
from pdrelay.errors import BenchError

MODEL = "bench"
HOSTS, INSTANCES = ("host-a", "host-b"), ("p-0", "rld-0", "md-0")
READY_SECONDS = 60.0
MISSING = 3
"""Exit code of a peer's script that is not installed."""


class Cores(NamedTuple):
    """Where gateway and load run; None where the machine has only one core."""

    gateway: int | None
    load: int | None


def cores() -> Cores:
    """The last core for the gateway, the first for all else."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[-1], usable[0]) if len(usable) > 1 else Cores(None, None)


class Site(NamedTuple):
    """The load and its engines, which all gateways share."""

    home: Path
    config: Path
    openai: str  # address at which the engines speak OpenAI
    gateway: str  # address for a gateway
    load: Child
    cores: Cores

    async def measure(self, task: Task) -> Result:
        """Raises BenchError when it fails."""
        await self.load.tell(msgspec.json.encode(task).decode())
        line = await self.load.line(task.warm_up + task.seconds + READY_SECONDS)
        result = msgspec.json.decode(line, type=Result)
        if result.failure is not None:
            raise BenchError(result.failure)
        return result


@asynccontextmanager
async def site(home: Path, model: Path, profile: Path) -> AsyncIterator[Site]:
    """Engines, clients and depots. `model` is a directory with a tokenizer. Raises BenchError."""
    openai, gateway, *places = free_addresses(2 + len(HOSTS) + len(INSTANCES))
    certs.ensure(home / "tls", [*HOSTS, *INSTANCES, GATEWAY])
    config = home / "pdrelay.toml"
    config.write_text("\n".join(_config(home, model, profile, gateway, places)) + "\n")
    where = cores()
    async with AsyncExitStack() as stack:
        arguments = [str(config), str(parse_address(openai)[1]), *([] if where.load is None else [str(where.load)])]
        load = await stack.enter_async_context(started("load", "pdrelay.bench.relay.load", arguments, home))
        await load.line()
        for host in HOSTS:
            depot = ["depot", "--config", str(config), "--name", host]
            child = await stack.enter_async_context(started(host, "pdrelay.cli.main", depot, home))
            _pin(child, where.load)
            await child.line()
        yield Site(home, config, openai, gateway, load, where)


@asynccontextmanager
async def ours(site: Site) -> AsyncIterator[Child]:
    """Our gateway, ready. Raises BenchError."""
    arguments = ["gateway", "--config", str(site.config)]
    async with started("gateway", "pdrelay.cli.main", arguments, site.home) as child:
        _pin(child, site.cores.gateway)
        await _healthy(child, site.gateway)
        yield child


@asynccontextmanager
async def peer(site: Site, script: Path) -> AsyncIterator[Child]:
    """Another gateway, ready. Raises BenchError."""
    arguments = ["--listen", str(parse_address(site.gateway)[1]), "--engine", f"http://{site.openai}", "--model", MODEL]
    async with started(script.stem, str(script), arguments, site.home) as child:
        _pin(child, site.cores.gateway)
        await _healthy(child, site.gateway)
        yield child


async def version_of(script: Path) -> str:
    """The installed version of a peer. Raises BenchError with the remedy when it is missing."""
    code, output, errors = await output_of([sys.executable, str(script), "--version"], READY_SECONDS)
    if code == MISSING:
        raise BenchError(f"not installed: {json.loads(output)['missing']}")
    if code:  # without the script as well: --peers names its directory
        raise BenchError((errors.strip().splitlines() or [f"exit code {code}"])[-1])
    return str(json.loads(output)["version"])


async def _healthy(child: Child, address: str) -> None:
    """Waits until the gateway answers a completion."""
    body = {"model": MODEL, "prompt": "ready?", "max_tokens": 2, "seed": 0, "stream": True}
    why = "no answer"
    try:
        async with asyncio.timeout(READY_SECONDS), httpx.AsyncClient(base_url=f"http://{address}") as client:
            while True:
                try:
                    response = await client.post("/v1/completions", json=body)
                    if response.status_code == 200 and b"[DONE]" in response.content:
                        return
                    why = response.text[:200]
                except httpx.HTTPError as error:
                    why = str(error) or type(error).__name__
                child.cpu_seconds()  # raises when it has ended
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise BenchError(f"{child.name}: not ready after {READY_SECONDS:g} s: {why}") from None


def _pin(child: Child, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(child.pid, {core})


def _config(home: Path, model: Path, profile: Path, gateway: str, places: list[str]) -> Iterator[str]:
    yield f'fleet_key_file = "{home / "tls" / "fleet.key"}"'
    yield f'model = {{ name = "{MODEL}", path = "{model}" }}'
    yield f'gateway = {{ cluster = "dc-a", listen = "{gateway}" }}'
    yield f'tls = {{ directory = "{home / "tls"}" }}'
    yield 'cluster = [{ name = "dc-a" }, { name = "dc-b" }]'
    for host, cluster, listen in zip(HOSTS, ("dc-a", "dc-b"), places, strict=False):
        yield f'[[host]]\nname = "{host}"\ncluster = "{cluster}"\nsocket = "{home / host}.sock"'
        yield f'listen = "{listen}"\narena = "64MiB"'
    rows = zip(INSTANCES, ("prefill", "relay", "decode"), ("host-a", "host-a", "host-b"), places[2:], strict=True)
    for name, role, host, listen in rows:
        yield f'[[instance]]\nname = "{name}"\nroles = ["{role}"]\nranks = [{{ host = "{host}" }}]'
        yield f'cluster = "{"dc-b" if host == "host-b" else "dc-a"}"'
        yield f'listen = "{listen}"\nengine = "emulated"\nprofile = "{profile}"'
    yield '[[link]]\nsource = "dc-a"\ntarget = "dc-b"\nrate = "10gbit"\nrtt = "0ms"\nconnections = 1'
