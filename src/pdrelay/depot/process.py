"""The depot process: one host's hub with all its listeners and links, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.tls import client_context, server_context
from pdrelay.cluster.topology import Host, Link
from pdrelay.cluster.units import parse_size, parse_time
from pdrelay.depot.arena import Arena
from pdrelay.depot.codec import codec_named
from pdrelay.depot.disk import NoDisk, open_disk
from pdrelay.depot.hub import Hub
from pdrelay.depot.link import DepotLink, Route
from pdrelay.depot.listener import TlsListener
from pdrelay.depot.metrics import render, serve_metrics
from pdrelay.depot.nixl.lanes import NixlLanes
from pdrelay.depot.nixl.setup import maker, require_nixl, writers
from pdrelay.depot.payload import LinkCodecs, RunDecoder, RunEncoder
from pdrelay.depot.server import DepotServer
from pdrelay.depot.tcp_options import require_congestion
from pdrelay.errors import ConfigError, StartError


def routes(deployment: Deployment, host: Host) -> Iterator[tuple[Link, Host]]:
    """Every host that a link of the cluster of `host` leads to, with that link."""
    for link in deployment.link:
        if link.source == host.cluster:
            for target in deployment.host:
                if target.cluster == link.target and target.name != host.name:
                    yield link, target


def link_codecs(deployment: Deployment, host: Host) -> LinkCodecs:
    """How every link from and to `host` encodes. Raises StartError when a library is missing."""
    codecs = LinkCodecs()
    for index, link in enumerate(deployment.link):
        for other in deployment.host:
            if other.name == host.name:
                continue
            ends = (host.cluster, other.cluster)
            if ends == (link.source, link.target):
                codecs.encoders[other.name] = RunEncoder(codec_named(link.codec, f"link[{index}].codec"))
            if ends == (link.target, link.source):
                codecs.decoders[other.name] = RunDecoder(codec_named(link.codec, f"link[{index}].codec"))
    return codecs


def clear_senders(deployment: Deployment, host: Host) -> list[str]:
    """The depots that send KV to `host` without TLS."""
    links = {source.name: deployment.link_between(source.cluster, host.cluster) for source in deployment.host}
    return [name for name, link in links.items() if link is not None and link.encryption == "control"]


def _route(link: Link, target: Host) -> Route:
    return Route(
        depot=target.name,
        control=link.control.get(target.name, target.listen),
        bulk=link.bulk.get(target.name, target.listen),
        connections=link.connections,
        rate=link.known_rate,
        rtt=parse_time(link.rtt),
        schedule=link.schedule,
        per_transfer=link.connections_per_transfer,
        congestion=link.congestion,
        encryption=link.encryption,
    )


def read_fleet_key(path: str) -> bytes:
    """The fleet key from its file of hexadecimal digits. Raises ConfigError."""
    try:
        text = Path(path).read_text().strip()
        key = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError(f"fleet_key_file: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"fleet_key_file: {path} does not hold hexadecimal digits") from error
    if not 16 <= len(key) <= 64:
        raise ConfigError(f"fleet_key_file: {path} holds {len(key)} bytes, expected 16 to 64")
    return key


@asynccontextmanager
async def running(deployment: Deployment, name: str) -> AsyncIterator[Hub]:
    """Runs the depot of host `name` as long as the context is open. Raises ConfigError, StartError."""
    host = deployment.host_named(name)
    key = read_fleet_key(deployment.fleet_key_file)
    codecs = link_codecs(deployment, host)
    client, server = (context(deployment.tls.directory, name) for context in (client_context, server_context))
    for index, link in enumerate(deployment.link):
        if link.source == host.cluster:
            require_congestion(link.congestion, f"link[{index}].congestion")
    async with AsyncExitStack() as stack:
        arena = _arena(host)
        epoch_base = time.time_ns() >> 10
        disk = open_disk(host.disk.path, parse_size(host.disk.size)) if host.disk is not None else NoDisk()
        hub = Hub(name, arena.view, key, time.monotonic, epoch_base, codecs, disk)
        await require_nixl(deployment, host, arena.fd)
        unix = DepotServer(hub, arena)
        stack.push_async_callback(unix.aclose)
        stack.callback(disk.close)  # before the arena that its threads read and write
        await unix.start(host.socket)
        agents = {depot: maker(link, name, arena.fd) for depot, link in writers(deployment, host)}
        stack.push_async_callback(TlsListener(hub, host.listen, server, agents, clear_senders(deployment, host)).aclose)
        if host.metrics:
            metrics = await serve_metrics(host.metrics, lambda: render(hub, server.files[1]))
            stack.callback(metrics.close)
        for link, target in routes(deployment, host):
            make_lanes = None
            if link.transport == "nixl":
                agents_out, encoder = maker(link, name, arena.fd), hub.codecs.encoder(target.name)
                make_lanes = partial(NixlLanes, agents_out, link.connections, hub.arena, encoder)
            stack.push_async_callback(DepotLink(hub, _route(link, target), client, make_lanes).aclose)
        yield hub


def _arena(host: Host) -> Arena:
    try:
        return Arena(parse_size(host.arena), host.huge_pages)
    except StartError as error:
        raise StartError(f"host {host.name}: {error}") from error
    except (OSError, ValueError) as error:
        raise StartError(f"host {host.name}: no arena of {host.arena}: {error}") from error


async def serve(deployment: Deployment, name: str, ready: Callable[[], None]) -> None:
    """Runs the depot until SIGTERM or SIGINT; calls `ready` once it serves. Raises ConfigError, StartError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(deployment, name):
        ready()
        await stop.wait()
