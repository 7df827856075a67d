"""What `up` does: prepares, starts, shows progress, and leaves either a healthy deployment or nothing."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from pdrelay.cli.local import attach, prepare
from pdrelay.cli.local.layout import Settings
from pdrelay.cli.local.progress import Progress
from pdrelay.cli.local.rundir import RunDirectory, RunState
from pdrelay.errors import StartError


class Starter:
    """One call of `up`. `wanted` is the demo's settings or a deployment file."""

    def __init__(self, run: RunDirectory, wanted: Settings | Path, *, detach: bool, as_json: bool) -> None:
        self._run, self._wanted, self._detach, self._as_json = run, wanted, detach, as_json
        self._console = Console(quiet=as_json, highlight=False)
        self._progress = Progress(self._console)

    def up(self, restart: bool) -> int:
        """The exit code. Raises ConfigError and StartError for what cannot be started."""
        if isinstance(self._wanted, Settings):
            self._wanted.check()
        self._run.make()
        lock = self._run.try_lock()
        if lock is None and not restart:
            return self._already_running()
        try:
            with attach.interruptible():
                return self._start(self._replace() if lock is None else lock)
        except attach.InterruptedByUser:
            self._console.print("interrupted: everything is stopped")
            return 130

    def _replace(self) -> int:
        """Stops what runs; the lock."""
        self._console.print(f"stopped {', '.join(attach.take_down(self._run))}")
        lock = self._run.try_lock()
        if lock is None:
            raise StartError(f"run directory {self._run.path}: another `pdrelay up` was faster")
        return lock

    def _start(self, lock: int) -> int:
        attach.clear_leftovers(self._run)
        plan = prepare.prepare(self._run, self._wanted, self._console.print)
        attachment = attach.launch(plan, self._run, lock)
        try:
            state = self._await_ready(attachment)
            self._report(state, "serving")
            if self._detach:
                attachment.detach()
            else:
                self._stay(attachment)
        except BaseException:
            attachment.stop()
            raise
        return 0

    def _await_ready(self, attachment: attach.Attachment) -> RunState:
        """Follows the start. Raises StartError when it failed, after everything is stopped again."""
        state: RunState | None = None
        with self._progress.waiting():
            for state in attachment.states(self._progress.tick):
                self._progress.show(state)
                if state.phase == "ready":
                    return state
        attachment.wait()
        if state is None or not state.failure:
            raise StartError(f"the start was stopped; see {self._run.supervisor_log}")
        for line in attach.failure_report(self._run, state):
            self._console.print(f"  | {line}", markup=False, soft_wrap=True)
        raise StartError(f"{state.failure}; everything is stopped again")

    def _stay(self, attachment: attach.Attachment) -> None:
        """Stays attached until the deployment ends; Ctrl-C ends it."""
        self._console.print("Ctrl-C stops it")
        for state in attachment.states():
            self._progress.show(state)
        attachment.wait()
        self._console.print("stopped")

    def _already_running(self) -> int:
        """Success when what runs is what is wanted. Raises StartError otherwise."""
        state = self._run.read_state()
        if state is None or state.phase not in ("ready", "failed"):
            phase = state.phase if state is not None else "starting"
            raise StartError(f"a deployment is {phase} in {self._run.path}: wait for it, or `pdrelay down`")
        wanted = prepare.describe(self._wanted)
        if wanted != state.settings:
            running = ", ".join(f"{key} {value}" for key, value in state.settings.items() if wanted.get(key) != value)
            raise StartError(f"already running with other settings ({running}): --restart replaces it")
        if not state.healthy:
            ended = ", ".join(part.name for part in state.parts if part.condition != "ready")
            raise StartError(f"already running, but {ended} ended (see `pdrelay status`): --restart replaces it")
        self._report(state, "already serving")
        return 0

    def _report(self, state: RunState, what: str) -> None:
        if self._as_json:
            print(json.dumps({"state": what, "url": state.url, "run_directory": str(self._run.path)}), flush=True)
        self._console.print(f"{what} on {state.url} (logs: {self._run.logs}; stop: pdrelay down)", soft_wrap=True)
