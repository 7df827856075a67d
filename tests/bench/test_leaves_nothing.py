"""However a benchmark ends, nothing of it stays: processes, network namespaces, files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from pdrelay.bench import namespaces

KIND = "user" if namespaces.why_not() else "namespaces"


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)  # a poll against a deadline: what is awaited is another process


class Run:
    """`pdrelay bench transfer --only table2` in the middle of its first row."""

    def __init__(self, scratch: Path) -> None:
        self._mark = f"BENCH_TEST={uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        arguments = ["bench", "transfer", "--only", "table2", "--line", KIND, "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdrelay.cli.main", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {name: value, "TMPDIR": str(scratch)}, text=True,
        )  # fmt: skip
        until(lambda: list(scratch.glob("pdrelay-bench-*/table2/*/host-a.sock")))

    def descendants(self) -> set[int]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                marked = self._mark in entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if marked:
                found.add(int(entry.parent.name))
        return found - {self.process.pid}

    def namespaces(self) -> list[Path]:
        return list(Path("/run/netns").glob(f"pdrelay-{self.process.pid}-*"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="b") as name:  # short: sockets' names are limited
        yield Path(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_order(scratch: Path, number: signal.Signals) -> None:
    run = Run(scratch)
    assert run.descendants()
    assert bool(run.namespaces()) == (KIND == "namespaces")
    run.process.send_signal(number)
    output, errors = run.process.communicate(timeout=30)
    assert run.process.returncode == 130, errors
    assert '"run": "interrupted"' in output
    assert run.descendants() == set()
    assert run.namespaces() == []
    assert list(scratch.iterdir()) == []


async def test_a_killed_run_takes_its_processes_along_and_the_next_run_removes_its_namespaces(scratch: Path) -> None:
    run = Run(scratch)
    run.process.kill()
    run.process.communicate(timeout=30)
    until(lambda: not run.descendants())
    if KIND == "namespaces":
        assert run.namespaces()
        async with namespaces.joined(1e6, 0.0):
            assert run.namespaces() == []
