"""Runs the line of a deployment: which addresses it stands between, and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from pathlib import Path
from typing import NamedTuple

from pdrelay.cluster.config import Deployment, load
from pdrelay.cluster.units import parse_address, parse_time
from pdrelay.errors import ConfigError
from pdrelay.wan.admin import Admin, parse_line_rate
from pdrelay.wan.line import Address, Line, Route
from pdrelay.wan.shaper import Lane


class LineSettings(NamedTuple):
    """What the line does: rate in bytes per second (math.inf: unlimited), round-trip time in seconds."""

    routes: list[Route]
    rate: float
    rtt: float
    admin: Address


def routes(deployment: Deployment) -> list[Route]:
    """Every address at which something is reached but does not listen itself."""
    found: dict[str, Route] = {}

    def add(lane: Lane, reached: str, listens: str) -> None:
        if reached and reached != listens:
            found.setdefault(reached, Route(lane, parse_address(reached), parse_address(listens)))

    for host in deployment.host:
        add(Lane.CONTROL, host.address, host.listen)
    for instance in deployment.instance:
        add(Lane.CONTROL, instance.address, instance.listen)
    for link in deployment.link:
        for lane, addresses in ((Lane.CONTROL, link.control), (Lane.BULK, link.bulk)):
            for name, address in addresses.items():
                add(lane, address, deployment.host_named(name).listen)
    return list(found.values())


def settings(config_path: Path, rate: str | None, rtt: str | None, admin: str) -> LineSettings:
    """Reads the file; options override it. Raises ConfigError."""
    deployment = load(config_path)
    slowest = min(deployment.link, key=lambda link: link.known_rate or math.inf, default=None)
    rate = rate or (slowest.rate if slowest and slowest.known_rate else "unlimited")
    rtt = rtt or (slowest.rtt if slowest else "0ms")
    try:
        return LineSettings(routes(deployment), parse_line_rate(rate), parse_time(rtt), parse_address(admin))
    except ValueError as error:
        raise ConfigError(f"line: {error}") from error


def describe(line: LineSettings, as_json: bool) -> str:
    """The settings as text."""
    rate = None if math.isinf(line.rate) else line.rate
    if as_json:
        rows = [{"class": r.lane.value, "listen": r.listen, "target": r.target} for r in line.routes]
        return json.dumps({"rate": rate, "rtt": line.rtt, "routes": rows})
    speed = "unlimited" if rate is None else f"{rate * 8 / 1e6:g} mbit"
    text = [f"line: {speed} each direction, round trip {line.rtt * 1e3:g} ms"]
    text += [f"  {r.lane.value:8}{r.listen[0]}:{r.listen[1]} -> {r.target[0]}:{r.target[1]}" for r in line.routes]
    return "\n".join(text)


def run(line: LineSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartError when an address is taken."""
    asyncio.run(_serve(line))


async def _serve(wanted: LineSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    line = Line(wanted.routes, wanted.rate, wanted.rtt)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(line.aclose)
        await line.start()
        admin = Admin(line)
        stack.push_async_callback(admin.aclose)
        await admin.start(wanted.admin)  # last: who reaches it knows that the routes listen
        await stop.wait()
