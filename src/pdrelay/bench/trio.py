"""A deployment of `pdrelay up`, started for a benchmark and stopped after it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from pdrelay.bench.children import output_of, shielded
from pdrelay.cluster.config import Deployment, load
from pdrelay.cluster.ports import free_addresses
from pdrelay.errors import BenchError

START_SECONDS = 600.0
STOP_SECONDS = 60.0


class Trio(NamedTuple):
    """A running deployment with prefill p-0, relay rld-0 and main decode md-0."""

    url: str
    deployment: Deployment


@asynccontextmanager
async def running(options: Sequence[str]) -> AsyncIterator[Trio]:
    """`pdrelay up` with `options` in a temporary directory, debug controls on. Raises BenchError."""
    (address,) = free_addresses(1)
    with tempfile.TemporaryDirectory(prefix="pdrelay-bench-") as name:
        directory = Path(name)
        port = address.rpartition(":")[2]
        try:
            await _pdrelay("up", "--run-dir", name, "--port", port, "--debug", *options, seconds=START_SECONDS)
            yield Trio(f"http://127.0.0.1:{port}", load(directory / "pdrelay.toml"))
        finally:
            await shielded(_pdrelay("down", "--run-dir", name, seconds=STOP_SECONDS))


async def _pdrelay(*arguments: str, seconds: float) -> None:
    code, out, err = await output_of([sys.executable, "-m", "pdrelay.cli.main", *arguments], seconds)
    if code:
        last = (err or out).strip().splitlines()[-8:]
        raise BenchError(f"pdrelay {arguments[0]} failed with exit code {code}: {os.linesep.join(last)}")
