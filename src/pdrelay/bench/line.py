"""The shaped line of a benchmark: between two network namespaces where that can be had, else in user space."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pdrelay.bench import namespaces
from pdrelay.bench.children import started
from pdrelay.bench.fleet import Route
from pdrelay.bench.settings import Kind
from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.units import parse_address
from pdrelay.errors import BenchError, ConfigError
from pdrelay.wan.line import Line as UserLine
from pdrelay.wan.line import Route as UserRoute
from pdrelay.wan.shaper import Lane

DEPOT_PORT, OTHER_PORT, SESSION_PORT = 7100, 7101, 7102


class Door(NamedTuple):
    """Where something listens behind the line, and where one dials to reach it through the line."""

    listen: str
    dial: str


class ShapedLine(NamedTuple):
    """A line that is up. `rate` in bytes per second each way, `rtt` in seconds."""

    kind: Kind
    rate: float
    rtt: float
    route: Route  # for two depots
    other: Door  # for one other server at a time
    session: Door  # for an engine's sessions: ahead of KV where the line tells them apart
    note: str = ""  # why it is not the kind that was first choice

    @property
    def sender_namespace(self) -> str | None:
        """Where the near side runs; None for the namespace of this process."""
        return self.route.sender_namespace

    @property
    def receiver_namespace(self) -> str | None:
        """Where the far side runs."""
        return self.route.receiver_namespace


def require(kind: Kind | None) -> None:
    """Raises ConfigError when a line of this kind cannot be had, as far as one can tell beforehand."""
    if kind == "namespaces" and (trouble := namespaces.why_not()):
        raise ConfigError(f"--line: {trouble}")


@asynccontextmanager
async def opened(kind: Kind | None, rate: float, rtt: float, logs: Path) -> AsyncIterator[ShapedLine]:
    """A line of the `kind` that is asked for; None takes namespaces if they can be had, else user space.

    Raises BenchError.
    """
    async with contextlib.AsyncExitStack() as stack:
        trouble = namespaces.why_not() if kind != "user" else ""
        if kind != "user" and not trouble:
            try:
                names = await stack.enter_async_context(namespaces.joined(rate, rtt))
            except BenchError as error:
                trouble = str(error)
            else:
                yield _between(names, rate, rtt)
                return
        if kind == "namespaces":
            raise BenchError(f"no line: {trouble}")
        line = await stack.enter_async_context(_in_user_space(rate, rtt, logs))
        yield line._replace(note=f"in user space, because {trouble}" if trouble else "")


def _between(names: namespaces.Namespaces, rate: float, rtt: float) -> ShapedLine:
    near, far = f"{namespaces.ADDRESS_A}:{DEPOT_PORT}", f"{namespaces.ADDRESS_B}:{DEPOT_PORT}"
    other, session = (f"{namespaces.ADDRESS_B}:{port}" for port in (OTHER_PORT, SESSION_PORT))
    route = Route(near, far, far, far, names.a, names.b)
    return ShapedLine("namespaces", rate, rtt, route, Door(other, other), Door(session, session))


@asynccontextmanager
async def _in_user_space(rate: float, rtt: float, logs: Path) -> AsyncIterator[ShapedLine]:
    near, far, other, session, to_control, to_bulk, to_other, to_session = free_addresses(8)
    routes = [
        [Lane.CONTROL.value, to_control, far],
        [Lane.BULK.value, to_bulk, far],
        [Lane.BULK.value, to_other, other],
        [Lane.CONTROL.value, to_session, session],
    ]
    async with started("line", __name__, [json.dumps([rate, rtt, routes])], logs) as child:
        await child.line()
        route = Route(near, far, to_control, to_bulk)
        yield ShapedLine("user", rate, rtt, route, Door(other, to_other), Door(session, to_session))


async def _serve(rate: float, rtt: float, routes: list[list[str]]) -> None:
    """The process of a line in user space, until it is killed."""
    line = UserLine(
        [UserRoute(Lane(lane), parse_address(listen), parse_address(target)) for lane, listen, target in routes],
        rate, rtt,
    )  # fmt: skip
    await line.start()
    print("up", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*json.loads(sys.argv[1])))
