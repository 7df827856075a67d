"""The process that makes tokens and reads them again behind a gateway: engines and clients of the benchmark.

    python -m pdrelay.bench.relay.load CONFIG PORT CORE

Serves the instances of the deployment file CONFIG over the session protocol, and all of them at PORT as one OpenAI
engine. Every line of standard input is a `Task`, answered by a line with a `Result`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette

from pdrelay.bench.relay.backend import SourceBackend
from pdrelay.bench.relay.client import Clients, Plan
from pdrelay.bench.relay.openai_face import face
from pdrelay.bench.relay.source import Source
from pdrelay.bench.relay.usage import Usage, usage_of
from pdrelay.cluster.config import Deployment, load
from pdrelay.cluster.tls import server_context
from pdrelay.cluster.topology import Instance
from pdrelay.cluster.units import parse_address
from pdrelay.engine.server import SessionServer
from pdrelay.perf import profile as profiles

STARTING_SECONDS = 30.0
"""In which every client must have had a token."""

IDLE_INTERVAL = 0.01
"""Steps between measurements, for clients that do not say what they have read."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `interval` 0 is lockstep; the gateway is the process `pid` and those below it."""

    plan: Plan
    interval: float
    warm_up: float
    seconds: float
    pid: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What it showed. Seconds, bytes."""

    seconds: float
    tokens: int
    requests: int
    ttfts: list[float]
    lags: list[float]
    cpu_seconds: float
    load_cpu_seconds: float  # of this process
    memory: int
    failure: str | None


async def serve(config: Path, port: int) -> None:
    """Until standard input ends."""
    deployment, source = load(config), Source()
    servers = [asyncio.create_task(_sessions(deployment, instance, source)) for instance in deployment.instance]
    openai = await asyncio.get_running_loop().create_server(face(source, deployment.model.name), "127.0.0.1", port)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    source.set_interval(IDLE_INTERVAL)
    print("ready", flush=True)
    while line := await reader.readline():
        result = await _measure(msgspec.json.decode(line, type=Task), source)
        source.set_interval(IDLE_INTERVAL)
        print(msgspec.json.encode(result).decode(), flush=True)
    openai.close()
    for server in servers:
        server.cancel()


async def _sessions(deployment: Deployment, instance: Instance, source: Source) -> None:
    profile = profiles.load(Path(instance.profile))
    backend = SourceBackend(instance.name, deployment.model.name, deployment.model.max_model_len, profile, source)
    app = Starlette(routes=[SessionServer(backend).route()])
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    config.ssl = server_context(deployment.tls.directory, instance.name)
    listener = socket.create_server(parse_address(instance.listen))
    await uvicorn.Server(config).serve(sockets=[listener])


async def _measure(task: Task, source: Source) -> Result:
    source.set_interval(task.interval)
    clients = Clients(task.plan, source)
    try:
        await clients.start()
        async with asyncio.timeout(STARTING_SECONDS):
            await clients.under_way.wait()
        await _pass(clients, task.warm_up)
        clients.take()
        before, own, start = usage_of(task.pid), time.process_time(), time.perf_counter()
        await _pass(clients, task.seconds)
        seconds, after, own = time.perf_counter() - start, usage_of(task.pid), time.process_time() - own
        seen = clients.take()
        await clients.stop()
    except TimeoutError:
        await clients.stop()
        return _failed(clients.failure or f"not all streams had begun after {STARTING_SECONDS:g} s")
    except OSError as error:
        return _failed(str(error))
    if clients.failure is not None:
        return _failed(clients.failure)
    return Result(
        seconds=seconds, tokens=seen.tokens, requests=seen.requests, ttfts=seen.ttfts, lags=seen.lags,
        cpu_seconds=after.cpu_seconds - before.cpu_seconds, load_cpu_seconds=own, memory=after.memory, failure=None,
    )  # fmt: skip


async def _pass(clients: Clients, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await clients.failed.wait()


def _failed(reason: str) -> Result:
    none = Usage(0.0, 0)
    return Result(
        seconds=0.0, tokens=0, requests=0, ttfts=[], lags=[], cpu_seconds=none.cpu_seconds, load_cpu_seconds=0.0,
        memory=none.memory, failure=reason,
    )  # fmt: skip


if __name__ == "__main__":
    if core := sys.argv[3:]:
        os.sched_setaffinity(0, {int(core[0])})
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
