from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from depot_kit import KEY, RunningDepot, contract
from link_kit import World

from pdrelay.cluster import certs
from pdrelay.depot.arena import Arena
from pdrelay.depot.hub import Hub
from pdrelay.depot.server import DepotServer


@pytest.fixture
async def depot(tmp_path: Path) -> AsyncIterator[RunningDepot]:
    arena = Arena(64 * contract().page_bytes)
    server = DepotServer(Hub("here", arena.view, KEY, time.monotonic), arena)
    path = tmp_path / "depot.sock"
    await server.start(path)
    yield RunningDepot(server, path)
    await server.aclose()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    certs.ensure(directory, ["p", "d", "q", "gateway"])
    return directory


@pytest.fixture
async def world(tmp_path: Path, tls: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack, tmp_path, tls)
