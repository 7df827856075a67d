"""Several gateway processes on one address: the kernel deals connections out among them.

Each has its own connections to engines and depots, its own view of what they hold, and its own metrics. Who asks any of
them for metrics gets those of all, told apart by the label `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
STARTED_SECONDS = 5.0
"""What ends within this time of its start is not started again."""

ASK_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1

Exposition = Callable[[], Awaitable[bytes]]


class Worker(NamedTuple):
    """One of several processes."""

    number: int
    directory: Path  # of the sockets at which all tell their metrics

    @property
    def socket(self) -> Path:
        """Its own."""
        return self.directory / f"worker-{self.number}.sock"


def supervise(command: Sequence[str], count: int) -> int:
    """Runs `count` processes of `command` until SIGTERM or SIGINT; one that ends otherwise is started again.

    Each gets `--worker NUMBER --worker-directory DIRECTORY --worker-of PROCESS`. Returns 0, or the exit code of one
    that could not start, which ends the others.
    """
    with tempfile.TemporaryDirectory(prefix="pdrelay-gateway-") as directory:
        shared = ["--worker-directory", directory, "--worker-of", str(os.getpid())]
        return _Supervisor([*command, *shared], count).run()


class _Supervisor:
    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command, self._count = command, count
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._since: dict[int, float] = {}
        self._stopping, self._result = False, 0

    def run(self) -> int:
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in range(self._count):
                self._start(number)
            while not self._stopping:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                self._look_after_all()
        finally:
            self._stop()
            for child in self._children.values():
                child.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._result

    def _start(self, number: int) -> None:
        self._children[number] = subprocess.Popen([*self._command, "--worker", str(number)])
        self._since[number] = time.monotonic()

    def _look_after_all(self) -> None:
        for number, child in list(self._children.items()):
            if (code := child.poll()) is None or self._stopping:
                continue
            if time.monotonic() - self._since[number] < STARTED_SECONDS:
                self._result = code or 1
                self._stop()
                return
            _log.error("worker %d ended with exit code %d and is started again", number, code)
            time.sleep(RESTART_SECONDS)
            self._start(number)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        for child in self._children.values():
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGTERM)


def end_with(supervisor: int) -> None:
    """This worker does not outlive the process that supervises it, which may be the first of a container."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        sys.exit(1)  # it died before the call above


def shared_socket(host: str, port: int) -> socket.socket:
    """A listener on an address at which other workers listen, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=True, backlog=2048)


@asynccontextmanager
async def metrics_of_all(worker: Worker, own: Callable[[], bytes]) -> AsyncIterator[Exposition]:
    """Tells the other workers our metrics; gives what collects everybody's."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(own())
        writer.write_eof()
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    worker.socket.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(tell, worker.socket)

    async def collect() -> bytes:
        others = [path for path in worker.directory.glob("worker-*.sock") if path != worker.socket]
        texts = await asyncio.gather(*(_ask(path) for path in others))
        named = {path.stem.removeprefix("worker-"): text for path, text in zip(others, texts, strict=True)}
        return merged({str(worker.number): own(), **named})

    try:
        yield collect
    finally:
        server.close()
        worker.socket.unlink(missing_ok=True)


def merged(expositions: dict[str, bytes]) -> bytes:
    """Expositions by worker in one; each sample says whose it is."""
    families: dict[str, Metric] = {}
    for worker in sorted(expositions):
        for family in text_string_to_metric_families(expositions[worker].decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "worker": worker}))
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _ask(path: Path) -> bytes:
    """A worker's metrics; nothing when it does not answer."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
