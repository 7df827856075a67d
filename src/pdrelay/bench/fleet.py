"""Two depot processes joined by one link, with an engine and a control connection at each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from pdrelay.bench.children import Child, shielded, started
from pdrelay.bench.producer import Producer, Template, template_of
from pdrelay.bench.settings import Place
from pdrelay.cluster import certs
from pdrelay.cluster.config import GATEWAY
from pdrelay.cluster.topology import ScheduleName
from pdrelay.depot.control_client import ControlClient, control_over_unix
from pdrelay.errors import BenchError, DepotUnavailableError
from pdrelay.kv.contract import KVContract

SENDER, RECEIVER = "host-a", "host-b"
READY_SECONDS = 20.0

Encryption = Literal["tls", "control"]
Transport = Literal["tcp", "nixl"]


class Route(NamedTuple):
    """Where the two depots are: addresses as `host:port`, network namespaces None for that of the benchmark.

    `control` and `bulk` are where the sender reaches the receiver; a line may stand there.
    """

    sender: str
    receiver: str
    control: str
    bulk: str
    sender_namespace: str | None = None
    receiver_namespace: str | None = None


class LinkOptions(NamedTuple):
    """The link's configuration; rate and round-trip time as people write them."""

    connections: int = 4
    rate: str = "10gbit"
    rtt: str = "1ms"
    encryption: Encryption = "tls"
    schedule: ScheduleName = "srpt"
    transport: Transport = "tcp"


class Site(NamedTuple):
    """One depot and our connections to it."""

    process: Child
    control: ControlClient
    engine: Producer


class Fleet(NamedTuple):
    """The two depots. What `sender` has, `receiver` can be sent."""

    sender: Site
    receiver: Site

    def cpu_seconds(self) -> float:
        """CPU time of both depots so far."""
        return self.sender.process.cpu_seconds() + self.receiver.process.cpu_seconds()


def make_certificates(directory: Path) -> Path:
    """Certificates of both depots and the fleet key, in a new directory below `directory`."""
    tls = directory / "certificates"
    certs.ensure(tls, [SENDER, RECEIVER, GATEWAY])
    return tls


@asynccontextmanager
async def running(
    name: str, place: Place, route: Route, link: LinkOptions, contract: KVContract, arena: int
) -> AsyncIterator[Fleet]:
    """Two depots with arenas of `arena` bytes, the link between them up. Raises BenchError."""
    home = place.home / name
    home.mkdir()
    config = write_config(home, place.certificates, route, link, arena)
    template = template_of(contract)
    async with AsyncExitStack() as stack:
        wheres = {RECEIVER: route.receiver_namespace, SENDER: route.sender_namespace}
        children = {host: await _start(stack, home, config, host, where) for host, where in wheres.items()}
        receiver, sender = [
            await _site(stack, home, host, child, contract, template) for host, child in children.items()
        ]
        await _link_up(sender.control)
        yield Fleet(sender, receiver)


def write_config(home: Path, certificates: Path, route: Route, link: LinkOptions, arena: int) -> Path:
    """The deployment file of the two depots, in directory `home`, where their sockets will be."""
    config = home / "pdrelay.toml"
    config.write_text("\n".join(_config(home, certificates, route, link, arena)) + "\n")
    return config


async def _start(stack: AsyncExitStack, home: Path, config: Path, host: str, namespace: str | None) -> Child:
    arguments = ["depot", "--config", str(config), "--name", host]
    name = f"{home.name}-{host}"
    return await stack.enter_async_context(started(name, "pdrelay.cli.main", arguments, home, namespace))


async def _site(
    stack: AsyncExitStack, home: Path, host: str, child: Child, contract: KVContract, template: Template
) -> Site:
    await child.line()  # says that it serves
    socket = home / f"{host}.sock"
    control = control_over_unix(str(socket))
    stack.push_async_callback(lambda: shielded(control.aclose()))
    await control.ready(READY_SECONDS)
    engine = await asyncio.to_thread(Producer, socket, f"engine-{host}", contract, template)
    stack.callback(engine.close)
    return Site(child, control, engine)


async def _link_up(control: ControlClient) -> None:
    """Waits until the link is up. Raises BenchError with the reason when it does not come up."""
    detail = "it was not tried"
    try:
        async with asyncio.timeout(READY_SECONDS):
            async for event in control.events():
                state = getattr(event, "up", None)
                if state:
                    return
                detail = getattr(event, "detail", detail)
    except (TimeoutError, DepotUnavailableError) as error:
        raise BenchError(f"link from {SENDER} to {RECEIVER}: not up in {READY_SECONDS:g} s: {detail}") from error


def _config(home: Path, tls: Path, route: Route, link: LinkOptions, arena: int) -> Iterator[str]:
    yield f'fleet_key_file = "{tls / "fleet.key"}"'
    yield 'model = { name = "bench", path = "bench" }'
    yield 'gateway = { cluster = "dc-a" }'
    yield f'tls = {{ directory = "{tls}" }}'
    yield "instance = []"
    yield 'cluster = [{ name = "dc-a" }, { name = "dc-b" }]'
    for host, cluster, listen in ((SENDER, "dc-a", route.sender), (RECEIVER, "dc-b", route.receiver)):
        yield "[[host]]"
        yield f'name = "{host}"'
        yield f'cluster = "{cluster}"'
        yield f'socket = "{home / host}.sock"'
        yield f'listen = "{listen}"'
        yield f'arena = "{arena}B"'
    yield "[[link]]"
    yield 'source = "dc-a"'
    yield 'target = "dc-b"'
    yield f'rate = "{link.rate}"'
    yield f'rtt = "{link.rtt}"'
    yield f"connections = {link.connections}"
    yield f'schedule = "{link.schedule}"'
    if link.encryption != "tls":
        yield f'encryption = "{link.encryption}"'
    yield f'control = {{ {RECEIVER} = "{route.control}" }}'
    if link.transport == "nixl":
        yield 'transport = "nixl"'
        yield 'nixl_env = { UCX_TLS = "tcp", UCX_NET_DEVICES = "lo" }'  # as the peer: else UCX takes shared memory
    else:
        yield f'bulk = {{ {RECEIVER} = "{route.bulk}" }}'
