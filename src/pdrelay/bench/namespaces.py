"""Two network namespaces, dc-a and dc-b, joined by a line of a set rate (tbf) and round-trip time (netem).

Needs root, `ip` and `tc`. Names carry our process id, so that runs do not meet and what a killed run left can be told
from what is in use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pdrelay.bench.children import output_of, shielded
from pdrelay.errors import BenchError

ADDRESS_A, ADDRESS_B = "10.213.0.1", "10.213.0.2"
QUEUE_SECONDS = 0.02
"""What the line buffers before it drops: as much as it carries in a usual round trip between datacenters."""
BURST_SECONDS = 1e-3
MIN_BURST = 16 << 10

_PREFIX = "pdrelay-"
_DIRECTORY = Path("/run/netns")
_COMMAND_SECONDS = 20.0


class Namespaces(NamedTuple):
    """Names of the two namespaces."""

    a: str
    b: str


def why_not() -> str:
    """Why namespaces cannot be had here; empty when they can, as far as one can tell without making any."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"network namespaces need {' and '.join(missing)} (install iproute2)" if missing else ""


@asynccontextmanager
async def joined(rate: float, rtt: float) -> AsyncIterator[Namespaces]:
    """The two namespaces with the line between them; `rate` in bytes per second each way, `rtt` in seconds.

    Raises BenchError when something that they need is missing.
    """
    for name in _ownerless():
        await _run("ip", "netns", "delete", name)
    names = Namespaces(f"{_PREFIX}{os.getpid()}-dc-a", f"{_PREFIX}{os.getpid()}-dc-b")
    try:
        for name in names:
            await _run("ip", "netns", "add", name)
            await _run("ip", "-n", name, "link", "set", "lo", "up")
        await _run("ip", "link", "add", "line", "netns", names.a, "type", "veth", "peer", "name", "line",
                   "netns", names.b)  # fmt: skip
        for name, address in zip(names, (ADDRESS_A, ADDRESS_B), strict=True):
            await _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "line")
            await _run("ip", "-n", name, "link", "set", "line", "up")
            await _shape(name, rate, rtt)
        yield names
    finally:
        await shielded(_remove(names))


async def _shape(name: str, rate: float, rtt: float) -> None:
    burst = int(max(MIN_BURST, rate * BURST_SECONDS))
    limit = burst + int(rate * max(QUEUE_SECONDS, rtt))
    await _run("tc", "-n", name, "qdisc", "add", "dev", "line", "root", "handle", "1:", "tbf",
               "rate", f"{int(rate * 8)}bit", "burst", str(burst), "limit", str(limit))  # fmt: skip
    if rtt:
        packets = str(int(limit / 64) + 1000)  # never netem's own limit: tbf's is in bytes
        await _run("tc", "-n", name, "qdisc", "add", "dev", "line", "parent", "1:1", "netem",
                   "delay", f"{rtt / 2 * 1e6:.0f}us", "limit", packets)  # fmt: skip


async def _remove(names: Namespaces) -> None:
    for name in names:
        if (_DIRECTORY / name).exists():
            await _run("ip", "netns", "delete", name)


def _ownerless() -> list[str]:
    """What runs that were killed left behind."""
    names = [path.name for path in _DIRECTORY.glob(f"{_PREFIX}*-dc-[ab]")]
    owners = {name: name.removeprefix(_PREFIX).partition("-")[0] for name in names}
    return [name for name, owner in owners.items() if owner.isdecimal() and not Path("/proc", owner).exists()]


async def _run(*command: str) -> None:
    code, _, errors = await output_of(command, _COMMAND_SECONDS)
    if code:
        reason = errors.strip().splitlines() or [f"exit code {code}"]
        raise BenchError(f"{' '.join(command)}: {reason[-1]}")
