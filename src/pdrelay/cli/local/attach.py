"""Starting a supervisor, following it, and taking a deployment down: the short-lived side of `up` and `down`."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec

from pdrelay.cli.local import processes
from pdrelay.cli.local.plan import Plan
from pdrelay.cli.local.rundir import MARKER, RunDirectory, RunState, boot_id, last_lines
from pdrelay.errors import StartError

_DOWN_TIMEOUT = 60.0
_GRACE = 3.0


class InterruptedByUser(BaseException):
    """SIGINT, SIGTERM or SIGHUP came while we were attached."""


class Attachment:
    """A running supervisor and the pipes to it."""

    def __init__(self, run: RunDirectory, process: subprocess.Popen[bytes]) -> None:
        self._run, self._process = run, process
        self._buffer = b""
        self._decoder = msgspec.json.Decoder(RunState)

    @property
    def _events(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def states(self, tick: Callable[[], None] = lambda: None, every: float = 0.5) -> Iterator[RunState]:
        """States as they change, until the supervisor ends; calls `tick` while nothing happens."""
        while True:
            if not select.select([self._events], [], [], every)[0]:
                tick()
                continue
            data = os.read(self._events.fileno(), 1 << 16)
            if not data:
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            yield from map(self._decoder.decode, lines)

    def detach(self) -> None:
        """Leaves the deployment running without us."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"detach\n")
        self._close()
        self._process.returncode = 0  # it lives on: keep Popen from warning about a child that still runs

    def stop(self) -> None:
        """Stops the deployment and waits until nothing of it is left."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        """Waits for the supervisor's end."""
        with suppress(BrokenPipeError):
            self._close()
        try:
            self._process.wait(_DOWN_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        clear_leftovers(self._run)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._events.close()


def launch(plan: Plan, run: RunDirectory, lock: int) -> Attachment:
    """Starts a supervisor for `plan`. It inherits `lock`, which is closed here."""
    run.plan.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    run.state.unlink(missing_ok=True)
    with run.supervisor_log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdrelay.cli.local.supervise", str(run.path), str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, MARKER: str(run.path)},
            pass_fds=[lock],
            start_new_session=True,
        )
    os.close(lock)
    return Attachment(run, process)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into InterruptedByUser; later ones are ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise InterruptedByUser

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_down(run: RunDirectory) -> list[str]:
    """Stops what runs in `run` and removes what was left behind; the names of the parts that were stopped.

    Raises StartError when the deployment does not end.
    """
    stopped: list[str] = []
    if run.running:
        state = run.read_state()
        stopped = [part.name for part in state.parts if part.condition in ("starting", "ready")] if state else []
        _stop_supervisor(run)
    killed = clear_leftovers(run)
    return stopped or [f"process {pid}" for pid in sorted(killed)]


def _stop_supervisor(run: RunDirectory) -> None:
    deadline = time.monotonic() + _DOWN_TIMEOUT
    told: int | None = None
    while run.running:
        pid = _supervisor_of(run)
        if pid is not None and pid != told:
            processes.send([pid], signal.SIGTERM)
            told = pid
        if time.monotonic() > deadline:
            if pid is None:
                raise StartError(f"run directory {run.path}: locked by a process that is not a supervisor")
            processes.send([pid], signal.SIGKILL)
        time.sleep(0.05)


def _supervisor_of(run: RunDirectory) -> int | None:
    """The supervisor's process, checked to be ours."""
    text = run.lock.read_text()
    pid = int(text) if text.isdecimal() else None
    return pid if pid is not None and pid in processes.marked(run.path) else None


def clear_leftovers(run: RunDirectory) -> set[int]:
    """Removes what a killed supervisor left: processes, shared memory, sockets. Only when none runs."""
    state = run.read_state()
    same_boot = state is not None and state.boot == boot_id()
    sessions = [part.pid for part in state.parts if part.pid and part.ended is None] if state and same_boot else []

    def left() -> set[int]:
        return processes.marked(run.path) | processes.in_sessions(sessions)

    names = processes.shared_memory_of(left())
    processes.send(left(), signal.SIGTERM)
    _wait_until(lambda: not left(), _GRACE)
    killed = processes.kill_all(left)
    processes.remove_shared_memory(names)
    if state is not None:
        shutil.rmtree(Path(state.temporary), ignore_errors=True)
    return killed


def _wait_until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def failure_report(run: RunDirectory, state: RunState) -> list[str]:
    """The last lines of the log of the part that failed."""
    part = state.part(state.failed_part)
    log = Path(part.log) if part is not None else run.supervisor_log
    return last_lines(log, 20)
