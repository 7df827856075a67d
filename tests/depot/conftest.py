from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from depot_kit import KEY, RunningDepot, contract

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
