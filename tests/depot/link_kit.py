"""Depots joined by real TLS connections, with a line between them that can be cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from depot_kit import KEY, contract, until

from pdrelay.cluster.tls import client_context, server_context
from pdrelay.depot.arena import Arena
from pdrelay.depot.control_client import ControlClient, connect_control
from pdrelay.depot.engine_client import SocketEngineDepot, connect_engine
from pdrelay.depot.hub import Hub
from pdrelay.depot.link import DepotLink, Route
from pdrelay.depot.listener import TlsListener
from pdrelay.depot.nixl.base import Agent, AgentListener
from pdrelay.depot.nixl.lanes import NixlLanes
from pdrelay.depot.nixl.process import AgentProcess, Settings
from pdrelay.depot.server import DepotServer
from pdrelay.kv.contract import KVContract

SHAPE = contract(part_bytes=24 << 10)
NIXL = Settings("UCX", {}, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})


class Line:
    """Forwards TCP connections to `port`, until cut; counts what passes."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.passed = 0
        self.seen: set[bytes] = set()  # of `watched_for`
        self.watched_for: tuple[bytes, ...] = ()
        self.cut_after: int | None = None  # bytes
        self.silent = False  # swallows everything
        self.flip_after: int | None = None  # bytes
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
                self.seen.update(wanted for wanted in self.watched_for if wanted in data)
                if self.cut_after is not None and self.passed > self.cut_after:
                    self.cut_after = None
                    self.cut()
                if self.flip_after is not None and self.passed > self.flip_after:
                    self.flip_after = None
                    data = data[:-1] + bytes([data[-1] ^ 1])
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

    def __init__(
        self, name: str, stack: AsyncExitStack, tmp_path: Path, tls: Path, pages: int, writers: Sequence[str] = (),
        clear: Sequence[str] = (), clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`writers` are the depots that write here by NIXL, `clear` those that send KV without TLS."""
        self.name, self.socket, self.tls, self._stack = name, tmp_path / f"{name}.sock", tls, stack
        self.arena = Arena(pages * SHAPE.page_bytes)
        self.hub = Hub(name, self.arena.view, KEY, clock, epoch_base=time.time_ns() >> 10)
        self._server = DepotServer(self.hub, self.arena)
        self.agents: list[AgentProcess] = []
        agents = dict.fromkeys(writers, self.agent)
        self.listener = TlsListener(self.hub, "127.0.0.1:0", server_context(tls, name), agents, clear)

    def agent(self, listener: AgentListener) -> Agent:
        self.agents.append(AgentProcess(self.name, NIXL, self.arena.fd, listener))
        return self.agents[-1]

    async def start(self) -> None:
        self._stack.push_async_callback(self._server.aclose)
        self._stack.push_async_callback(self.listener.aclose)
        await self._server.start(self.socket)

    def link(
        self, to: str, control: str, bulk: str | None = None, *, tls: Path | None = None, nixl: bool = False,
        **route: Any,
    ) -> DepotLink:  # fmt: skip
        """`route` has further fields of Route."""
        make_lanes = partial(NixlLanes, self.agent, 4, self.hub.arena, self.hub.codecs.encoder(to)) if nixl else None
        link = DepotLink(
            self.hub,
            Route(to, control, bulk or control, **{"connections": 2, "rate": 1e9, "rtt": 1e-3} | route),
            client_context(tls or self.tls, self.name),
            make_lanes,
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

    async def site(self, name: str, pages: int = 64, writers: Sequence[str] = (), clear: Sequence[str] = ()) -> Site:
        site = Site(name, self.stack, self.tmp_path, self.tls, pages, writers, clear)
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
        await until(lambda: p.hub.links.up().get("d", False))
        return p, d, line
