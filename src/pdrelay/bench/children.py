"""Processes that a benchmark starts: they answer in lines, and none outlives the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pdrelay.errors import BenchError

START_SECONDS = 30.0
STOP_SECONDS = 10.0
_LINE_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1


class CoreTimes(NamedTuple):
    """Seconds of a process since its start, those of its threads that live."""

    ran: float
    waited: float  # could have run, but other work had the cores


class Child:
    """One process. Make it with `started`."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def line(self, timeout: float = START_SECONDS) -> str:
        """The next line of its output. Raises BenchError when it ended or says nothing in time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"{self.name}: no answer in {timeout:g} s{self._last_words()}") from None
        if not line:
            code = await self._process.wait()
            raise BenchError(f"{self.name}: ended with exit code {code}{self._last_words()}")
        return line.decode(errors="replace").rstrip("\n")

    async def tell(self, text: str) -> None:
        """Writes a line to its input. Raises BenchError when it ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            raise BenchError(f"{self.name}: takes no input: {error}{self._last_words()}") from error

    def cpu_seconds(self) -> float:
        """CPU time of it and of its living children so far, to the nanosecond. Raises BenchError when it ended."""
        try:
            return sum(map(_cpu_seconds, _family(self.pid)))
        except OSError as error:
            raise BenchError(f"{self.name}: has ended{self._last_words()}") from error

    def core_times(self) -> CoreTimes:
        """How long its threads ran on a core, and waited for one. Raises BenchError when it ended."""
        rows: list[list[str]] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                rows.append(path.read_text().split())
        if not rows:
            raise BenchError(f"{self.name}: has ended{self._last_words()}")
        return CoreTimes(sum(int(row[0]) for row in rows) / 1e9, sum(int(row[1]) for row in rows) / 1e9)

    async def stop(self) -> None:
        """Ends it, by force if it does not end in time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.communicate()
                return
            except TimeoutError:
                continue

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {lines[-1].strip()}" if lines else ""


@asynccontextmanager
async def started(
    name: str, module: str, arguments: Sequence[str], logs: Path, namespace: str | None = None
) -> AsyncIterator[Child]:
    """Runs `python -m module` as long as the context is open, in a network namespace if one is named.

    `module` may be the path of a script.

    Its standard error goes to a file in `logs`. Raises BenchError when it cannot be started.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]
    if namespace is not None:
        command = ["ip", "netns", "exec", namespace, *command]
    log = logs / f"{name}.log"
    # A session of its own: Ctrl-C in the terminal reaches the benchmark alone, which then ends its children in order.
    with log.open("ab") as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True, limit=_LINE_BYTES
            )
        except OSError as error:
            raise BenchError(f"{name}: cannot be started: {error}") from error
    child = Child(name, process, log)
    try:
        yield child
    finally:
        await shielded(child.stop())


async def shielded(work: Coroutine[Any, Any, object]) -> None:
    """Awaits cleaning up to its end even when cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def output_of(arguments: Sequence[str], timeout: float) -> tuple[int, str, str]:
    """Runs a program to its end: exit code, output, error output. Raises BenchError when it takes too long."""
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(timeout):
            output, errors = await process.communicate()
    except TimeoutError:
        raise BenchError(f"{arguments[0]}: no end after {timeout:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await shielded(process.wait())
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


def _main() -> None:
    """Becomes the module that the arguments name; dies with the process that started it."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before the call above
    sys.argv[:] = [module, *sys.argv[3:]]
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()


def _family(pid: int) -> Iterator[int]:
    """A process and its children, without theirs. Raises OSError when it has ended."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, children.read_text().split())


def _cpu_seconds(pid: int) -> float:
    # clock_getcpuclockid(3) makes the number of another process's CPU clock in this way.
    return time.clock_gettime((~pid << 3) | 2)
