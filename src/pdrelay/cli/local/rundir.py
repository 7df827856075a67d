"""The run directory of a deployment: where its files are, whether it runs, what state it is in.

A lock on `lock` is held exactly while a supervisor lives, so a stale file never passes for a running deployment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path
from typing import Literal

import msgspec

from pdrelay.errors import ConfigError

MARKER = "PDRELAY_RUN"
"""Environment variable of every process of a deployment; its value is the run directory."""

Phase = Literal["starting", "ready", "failed", "stopping", "stopped"]
Condition = Literal["waiting", "starting", "ready", "exited", "stopped"]


class PartState(msgspec.Struct, kw_only=True):
    """One part of a deployment. Times are Unix time."""

    name: str
    kind: str
    address: str
    metrics: str = ""
    log: str
    condition: Condition = "waiting"
    pid: int | None = None
    started: float | None = None
    ready_after: float | None = None  # seconds from its start
    ended: float | None = None
    exit_code: int | None = None  # negative: the signal
    last_line: str = ""  # of its log, when it ended by itself


class RunState(msgspec.Struct, kw_only=True):
    """What the supervisor knows, as in `state.json`."""

    phase: Phase
    supervisor: int
    boot: str
    temporary: str
    url: str
    settings: dict[str, str]
    parts: list[PartState]
    failure: str = ""
    failed_part: str = ""

    def part(self, name: str) -> PartState | None:
        """The part called `name`."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def healthy(self) -> bool:
        """Everything runs."""
        return self.phase == "ready" and all(part.condition == "ready" for part in self.parts)


class RunDirectory:
    """Paths below a run directory, and the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.config = self.path / "pdrelay.toml"
        self.certificates = self.path / "tls"
        self.logs = self.path / "logs"
        self.plan = self.path / "plan.json"
        self.state = self.path / "state.json"
        self.lock = self.path / "lock"
        self.supervisor_log = self.logs / "supervisor.log"

    @classmethod
    def default(cls) -> RunDirectory:
        """The directory used when none is named."""
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return cls(Path(base) / "pdrelay")

    def make(self) -> None:
        """Makes the directory. Raises ConfigError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run directory {self.path}: cannot be made: {error.strerror}") from error

    def try_lock(self) -> int | None:
        """The descriptor that holds the lock, for the supervisor to inherit; None while a deployment runs."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @property
    def running(self) -> bool:
        """Whether a deployment runs, starts or stops here."""
        if not self.lock.exists():
            return False
        descriptor = self.try_lock()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def read_state(self) -> RunState | None:
        """The last state that a supervisor wrote; None when there is none."""
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=RunState)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, OSError) as error:
            raise ConfigError(f"{self.state}: cannot be read: {error}") from error

    def write_state(self, state: RunState) -> None:
        """Replaces `state.json` in one step."""
        draft = self.state.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        draft.replace(self.state)


def boot_id() -> str:
    """Names this boot of the machine: process numbers of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def last_lines(log: Path, count: int) -> list[str]:
    """The last non-empty lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def exit_text(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
