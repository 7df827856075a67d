"""One deployment of the comparison: two datacenters on this machine with a shaped line between them.

dc-a: gateway, host-a with prefill p-0, p-1 and relay rld-0      dc-b: host-b with main decode md-0
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pdrelay.bench.children import Child, started
from pdrelay.bench.compare.experiment import PREFILLS
from pdrelay.bench.line import ShapedLine
from pdrelay.cluster import certs
from pdrelay.cluster.config import GATEWAY
from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.topology import Role
from pdrelay.cluster.units import parse_address

MODEL = "bench"
ARENA = "1GiB"
UNBOUNDED = 'relay_max_tokens = 1000000, relay_max_time = "1000000s"'
"""The evaluation's relay has no bound that was reached."""
PREFILL_NAMES = tuple(f"p-{number}" for number in range(PREFILLS))
NAMES = ("host-a", "host-b", *PREFILL_NAMES, "rld-0", "md-0", GATEWAY)


class Fleet(NamedTuple):
    """What all deployments of a run share."""

    home: Path
    model: Path  # directory with a tokenizer
    profiles: dict[Role, Path]


class Site(NamedTuple):
    """A running deployment. `namespace` is where its gateway is, None for this process's own."""

    url: str
    namespace: str | None
    near_depot: Path  # its socket


@asynccontextmanager
async def running(fleet: Fleet, line: ShapedLine, policy: str, handoff: str, name: str) -> AsyncIterator[Site]:
    """Starts all parts. Raises BenchError when one does not start; the gateway's /health says when they are ready."""
    certs.ensure(fleet.home / "tls", NAMES)
    home = fleet.home / name
    home.mkdir()
    near = _near_addresses(line, PREFILLS + 2)
    config = home / "pdrelay.toml"
    config.write_text("\n".join(_config(fleet, home, line, policy, handoff, near)) + "\n")
    a, b = line.sender_namespace, line.receiver_namespace
    parts: dict[str, Child] = {}
    async with AsyncExitStack() as stack:

        async def start(kind: str, part: str, where: str | None) -> None:
            named = [] if kind == "gateway" else ["--name", part]
            arguments = [kind, "--config", str(config), *named]
            child = await stack.enter_async_context(started(part, "pdrelay.cli.main", arguments, home, where))
            parts[part] = child

        for host, where in (("host-b", b), ("host-a", a)):
            await start("depot", host, where)
        for host in ("host-b", "host-a"):
            await parts[host].line()
        for engine in (*PREFILL_NAMES, "rld-0"):
            await start("engine", engine, a)
        await start("engine", "md-0", b)
        await start("gateway", GATEWAY, a)
        yield Site(f"http://{near[-1]}", a, home / "host-a.sock")


def _near_addresses(line: ShapedLine, count: int) -> list[str]:
    host, port = parse_address(line.route.sender)
    if line.sender_namespace is None:
        return free_addresses(count)
    return [f"{host}:{port + 100 + number}" for number in range(count)]


def _config(fleet: Fleet, home: Path, line: ShapedLine, policy: str, handoff: str, near: list[str]) -> Iterator[str]:
    route, tls = line.route, fleet.home / "tls"
    yield f'fleet_key_file = "{tls / "fleet.key"}"'
    yield f'model = {{ name = "{MODEL}", path = "{fleet.model}", max_model_len = 65536 }}'
    yield f'gateway = {{ cluster = "dc-a", listen = "{near[-1]}", debug = true }}'
    yield f'tls = {{ directory = "{tls}" }}'
    yield f'policy = {{ name = "{policy}", handoff = "{handoff}", {UNBOUNDED} }}'
    yield 'cluster = [{ name = "dc-a" }, { name = "dc-b" }]'
    for host, cluster, listen, reached in (
        ("host-a", "dc-a", route.sender, route.sender), ("host-b", "dc-b", route.receiver, route.control),
    ):  # fmt: skip
        yield f'[[host]]\nname = "{host}"\ncluster = "{cluster}"\nsocket = "{home / host}.sock"'
        yield f'listen = "{listen}"\naddress = "{reached}"\narena = "{ARENA}"'
    prefill, decode = fleet.profiles[Role.PREFILL], fleet.profiles[Role.DECODE]
    for name, address in zip(PREFILL_NAMES, near, strict=False):
        yield from _instance(name, ["prefill"], "a", address, address, prefill)
    # The baseline that decodes beside prefill uses the relay's engine as its decoder.
    beside = ["relay", "decode"] if policy == "idc_pd" else ["relay"]
    yield from _instance("rld-0", beside, "a", near[-2], near[-2], decode)
    yield from _instance("md-0", ["decode"], "b", line.session.listen, line.session.dial, decode)
    rate, rtt = f"{line.rate * 8 / 1e3:.0f}kbit", f"{line.rtt * 1e3:g}ms"
    yield f'[[link]]\nsource = "dc-a"\ntarget = "dc-b"\nrate = "{rate}"\nrtt = "{rtt}"'
    yield f'control = {{ host-b = "{route.control}" }}\nbulk = {{ host-b = "{route.bulk}" }}'


def _instance(name: str, roles: list[str], site: str, listen: str, address: str, profile: Path) -> Iterator[str]:
    yield f'[[instance]]\nname = "{name}"\ncluster = "dc-{site}"\nroles = {roles}'
    yield f'ranks = [{{ host = "host-{site}" }}]\nlisten = "{listen}"\naddress = "{address}"'
    yield f'engine = "emulated"\nprofile = "{profile}"'
