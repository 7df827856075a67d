"""The supervisor: one process that starts a deployment's parts, watches them, and leaves nothing behind.

    python -m pdrelay.cli.local.supervise RUN_DIRECTORY LOCK_DESCRIPTOR

Standard input is the leash: `up` writes `detach` when the deployment shall live on without it; if it ends before
that, everything is stopped. Standard output carries the state as JSON lines, one a change, until then.

INV-UP-1: when the supervisor ends, no process that descends from it lives, whatever group or session it moved to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from pdrelay.cli.local import processes
from pdrelay.cli.local.plan import Part, Plan
from pdrelay.cli.local.probe import is_ready
from pdrelay.cli.local.rundir import (
    MARKER,
    Condition,
    PartState,
    Phase,
    RunDirectory,
    RunState,
    boot_id,
    exit_text,
    last_lines,
)
from pdrelay.errors import StartError

_PROBE_EVERY = 0.1
_HELPER_LOOKS = 20


class Running:
    """One part: its process and what is known of it."""

    def __init__(self, part: Part, log: Path) -> None:
        self.part, self.log = part, log
        self.state = PartState(name=part.name, kind=part.kind, address=part.address, metrics=part.metrics, log=str(log))
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Started and not ended."""
        return self.process is not None and not self.ended.is_set()

    def start(self, environment: dict[str, str]) -> None:
        """Starts the process in a session of its own."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.part.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=processes.end_with_parent,  # safe: the supervisor has no threads
            )
        self.state.pid, self.state.started, self.state.condition = self.process.pid, time.time(), "starting"

    def reap(self, stopping: bool) -> None:
        """Notes the end of the process."""
        assert self.process is not None
        self.state.exit_code = self.process.wait()
        self.state.ended = time.time()
        self.state.condition = "stopped" if stopping else "exited"
        if not stopping:
            self.state.last_line = next(iter(last_lines(self.log, 1)), "")
        self.ended.set()


class Supervisor:
    """Starts, watches and stops the parts of one plan. `publish` is called with the state after each change."""

    def __init__(self, plan: Plan, run: RunDirectory, publish: Callable[[RunState], None]) -> None:
        self._plan, self._publish = plan, publish
        self._parts = {part.name: Running(part, run.logs / f"{part.name}.log") for part in plan.parts}
        self._stopping = False
        self._shared_memory: set[Path] = set()
        self._begun = time.time()
        self.state = RunState(
            phase="starting",
            supervisor=os.getpid(),
            boot=boot_id(),
            temporary=plan.temporary,
            url=plan.url,
            settings=plan.settings,
            parts=[running.state for running in self._parts.values()],
        )

    async def start(self) -> None:
        """Starts stage after stage. Raises StartError naming the part that did not become ready."""
        self._publish(self.state)
        for stage in self._plan.stages:
            await self._start_stage([self._parts[part.name] for part in stage])
        self._note_shared_memory()  # a part that is killed later cannot be asked any more
        self._enter("ready")

    async def stop(self) -> None:
        """Stops everything, latest stage first, and sweeps what is left."""
        self._stopping = True
        self._note_shared_memory()
        for stage in reversed(self._plan.stages):
            await asyncio.gather(*(self._stop_part(self._parts[part.name]) for part in stage))
        await self._sweep()

    def fail(self, error: StartError, part: str) -> None:
        """Notes why the start failed."""
        self.state.failure, self.state.failed_part = str(error), part
        self._enter("failed")

    def stopping(self) -> None:
        """Notes that the end has begun."""
        self._enter("stopping")

    def stopped(self) -> None:
        """Notes that nothing runs any more; a failed start stays noted."""
        if self.state.failure:
            self._publish(self.state)
        else:
            self._enter("stopped")

    def on_child(self) -> None:
        """SIGCHLD: reaps parts, and orphans that became our children."""
        by_pid = {running.process.pid: running for running in self._parts.values() if running.process is not None}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                running = by_pid.get(found.si_pid)
                if running is None:
                    os.waitpid(found.si_pid, 0)
                else:
                    running.reap(self._stopping)
                    self._publish(self.state)

    def _enter(self, phase: Phase) -> None:
        self.state.phase = phase
        self._publish(self.state)

    def _mark(self, running: Running, condition: Condition) -> None:
        running.state.condition = condition
        self._publish(self.state)

    async def _start_stage(self, stage: list[Running]) -> None:
        for running in stage:
            running.start(self._environment(running.part))
        self._publish(self.state)
        waits = [asyncio.create_task(self._become_ready(running)) for running in stage]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()

    async def _become_ready(self, running: Running) -> None:
        part, begun = running.part, time.monotonic()
        while not await is_ready(part.ready):
            for other in self._parts.values():
                if other.ended.is_set():
                    raise PartFailedError(
                        other.part.name, f"ended during the start, {exit_text(other.state.exit_code)}"
                    )
            if time.monotonic() - begun > part.start_timeout:
                raise PartFailedError(part.name, f"was not ready after {part.start_timeout:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.ended.wait(), _PROBE_EVERY)
        running.state.ready_after = time.monotonic() - begun
        if not running.ended.is_set():
            self._mark(running, "ready")

    def _environment(self, part: Part) -> dict[str, str]:
        return {
            **os.environ,
            **part.environment,
            MARKER: self._plan.run_directory,
            "PYTHONUNBUFFERED": "1",  # a log is read while its part runs
            "TMPDIR": self._plan.temporary,
        }

    def _note_shared_memory(self) -> None:
        self._shared_memory |= processes.shared_memory_of(processes.descendants(os.getpid()))

    async def _stop_part(self, running: Running) -> None:
        if running.process is None:
            return
        if running.alive:
            # Not Popen.terminate: it may reap the process itself, unseen by `on_child`.
            processes.send([running.process.pid], signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.ended.wait(), running.part.stop_timeout)
        await self._let_helpers_end(running.process.pid)
        # What the part started in its session goes with it, also when the part itself ended in good order.
        processes.send(processes.in_sessions([running.process.pid]), signal.SIGKILL)
        await running.ended.wait()

    async def _let_helpers_end(self, session: int) -> None:
        """Python's resource trackers outlive their process for a moment and unlink the semaphores that it left."""
        for _ in range(_HELPER_LOOKS):
            if not processes.in_sessions([session]):
                return
            await asyncio.sleep(_PROBE_EVERY)

    async def _sweep(self) -> None:
        self._note_shared_memory()  # once more: parts may map more while they stop
        processes.kill_all(lambda: processes.descendants(os.getpid()))
        self.on_child()
        assert not processes.descendants(os.getpid()), "INV-UP-1"
        processes.remove_shared_memory(self._shared_memory | processes.semaphores_since(self._begun))
        shutil.rmtree(self._plan.temporary, ignore_errors=True)


class PartFailedError(StartError):
    """A part did not become ready."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {reason}")
        self.part = part


class Leash:
    """The pipes to `up`."""

    def __init__(self, control: int, events: IO[bytes]) -> None:
        self._control, self._events = control, events
        self._encoder = msgspec.json.Encoder()
        self._detached = False

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls `lost` when `up` is gone without having detached."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            data = os.read(self._control, 64)
            if b"detach" in data:
                self._detached = True
            if self._detached or not data:
                loop.remove_reader(self._control)
            if not data and not self._detached:
                lost()

        loop.add_reader(self._control, readable)

    def tell(self, state: RunState) -> None:
        """Sends the state to `up`, if it still listens."""
        if not self._detached:
            with contextlib.suppress(OSError):
                self._events.write(self._encoder.encode(state) + b"\n")
                self._events.flush()


async def supervise(run: RunDirectory, leash: Leash) -> bool:
    """Starts the plan of `run` and keeps it until told to stop; whether the start succeeded."""
    plan = msgspec.json.decode(run.plan.read_bytes(), type=Plan)

    def publish(state: RunState) -> None:
        try:
            run.write_state(state)
        except OSError as error:  # a full disk must not keep us from watching and stopping
            print(f"cannot write {run.state}: {error}", file=sys.stderr, flush=True)
        leash.tell(state)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    processes.adopt_orphans()
    supervisor = Supervisor(plan, run, publish)
    loop.add_signal_handler(signal.SIGCHLD, supervisor.on_child)
    leash.watch(stop.set)
    start, told = asyncio.create_task(supervisor.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({start, told}, return_when=asyncio.FIRST_COMPLETED)
        if start.done() and start.exception() is None:
            await told
        error = start.exception() if start.done() and not start.cancelled() else None
        if isinstance(error, StartError):
            supervisor.fail(error, error.part if isinstance(error, PartFailedError) else "")
        elif error is not None:
            raise error
        else:
            supervisor.stopping()
        return error is None
    finally:
        for task in (start, told):
            task.cancel()
        await asyncio.gather(start, told, return_exceptions=True)
        await supervisor.stop()
        supervisor.stopped()


def main() -> None:
    """Entry point. The lock's descriptor stays open until this process ends."""
    run, lock = RunDirectory(Path(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    os.set_inheritable(lock, False)
    with open(os.dup(1), "wb") as events:
        os.dup2(2, 1)
        good = asyncio.run(supervise(run, Leash(0, events)))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
