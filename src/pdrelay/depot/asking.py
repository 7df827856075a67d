"""Asks running depots for their counters and live transfers, as an operator does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdrelay.cluster.config import GATEWAY, Deployment
from pdrelay.cluster.tls import client_context
from pdrelay.cluster.topology import Host
from pdrelay.depot.base import DepotStats, Progress
from pdrelay.depot.control_client import ControlClient, connect_control, control_over_unix
from pdrelay.errors import ConfigError, DepotUnavailableError

TIMEOUT_SECONDS = 3.0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a depot answered, or why it did not."""

    stats: DepotStats | None = None
    progress: list[Progress] = []  # of its live transfers, the oldest first
    error: str = ""


async def ask(deployment: Deployment, hosts: Sequence[Host]) -> dict[str, Answer]:
    """What the depots of `hosts` tell, by host. Raises ConfigError when no certificate is there to ask with."""
    answers = await asyncio.gather(*(_ask_one(deployment, host) for host in hosts))
    return dict(zip((host.name for host in hosts), answers, strict=True))


async def _ask_one(deployment: Deployment, host: Host) -> Answer:
    client = _client(deployment, host)
    try:
        await client.ready(TIMEOUT_SECONDS)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return Answer(await client.stats(), await client.progress())
    except (DepotUnavailableError, TimeoutError) as error:
        return Answer(error=str(error) or f"no answer in {TIMEOUT_SECONDS:.0f} s")
    finally:
        await client.aclose()


def _client(deployment: Deployment, host: Host) -> ControlClient:
    if Path(host.socket).is_socket():
        return control_over_unix(host.socket, "stats")
    tls = client_context(deployment.tls.directory, _own_name(deployment))
    return connect_control(host.address or host.listen, tls, host.name, "stats")


def _own_name(deployment: Deployment) -> str:
    """A part whose certificate is on this machine. Raises ConfigError."""
    directory = Path(deployment.tls.directory)
    parts = [GATEWAY, *(host.name for host in deployment.host)]
    for part in parts:
        if (directory / f"{part}.key").is_file():
            return part
    raise ConfigError(f"tls.directory: found no certificate of {' or '.join(parts)} in {directory}, expected one")
