"""Stock vLLM beside ours in the comparison on real engines: `benchmarks/peers/stock_pd.py` between two namespaces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pdrelay.bench import namespaces
from pdrelay.bench.children import output_of, started
from pdrelay.bench.compare.run import Where
from pdrelay.bench.relay.contestants import version_of
from pdrelay.errors import BenchError

LISTEN = 7200
START_SECONDS = 600.0
_COMMAND_SECONDS = 60.0


class Peer(NamedTuple):
    """Its script, and a directory with a checkpoint."""

    script: Path
    model: Path


@asynccontextmanager
async def running(peer: Peer, name: str, rate: float, rtt: float, home: Path) -> AsyncIterator[Where]:
    """Starts the peer, which calls its model `name`, over a line of `rate` bytes per second and, where the kernel has
    netem, a round trip of `rtt` seconds.

    Bytes sent are the line's, headers included. Raises BenchError, with the remedy when the peer is not installed.
    """
    if trouble := namespaces.why_not():
        raise BenchError(trouble)
    await version_of(peer.script)
    async with AsyncExitStack() as stack:
        try:
            names = await stack.enter_async_context(namespaces.joined(rate, rtt))
        except BenchError:  # without netem: a shorter round trip is to the peer's advantage
            names = await stack.enter_async_context(namespaces.joined(rate, 0.0))
        here, there = namespaces.ADDRESS_A, namespaces.ADDRESS_B
        arguments = [
            "--model", str(peer.model), "--name", name, "--listen", str(LISTEN), "--here", here, "--there", there,
            "--decode-namespace", names.b,
        ]  # fmt: skip
        child = await stack.enter_async_context(started("stock_pd", str(peer.script), arguments, home, names.a))
        if (said := await child.line(START_SECONDS)) != "ready":
            raise BenchError(f"stock_pd: {said}")
        yield Where(f"http://{here}:{LISTEN}", names.a, partial(_carried, names.a))


async def _carried(namespace: str) -> int:
    """Bytes that left through the line."""
    code, output, errors = await output_of(
        ["ip", "-n", namespace, "-s", "-j", "link", "show", "line"], _COMMAND_SECONDS
    )
    if code:
        raise BenchError(f"ip link: {errors.strip()}")
    (link,) = json.loads(output)
    return int(link["stats64"]["tx"]["bytes"])
