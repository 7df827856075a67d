"""Processes of a deployment, found in /proc by session, by ancestry and by marker variable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pdrelay.cli.local.rundir import MARKER

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where POSIX shared memory is, not a temporary file of ours

_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One row of /proc."""

    pid: int
    parent: int
    session: int
    zombie: bool


def table() -> list[Process]:
    """All processes that can be seen."""
    return [row for row in map(_read, os.listdir("/proc")) if row is not None]


def _read(name: str) -> Process | None:
    if not name.isdecimal():
        return None
    try:
        text = Path("/proc", name, "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return Process(int(name), int(fields[1]), int(fields[3]), fields[0] in "ZX")


def descendants(ancestor: int) -> set[int]:
    """Living children of `ancestor`, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for row in table():
        children.setdefault(row.parent, []).append(row)
    found: set[int] = set()
    frontier = [ancestor]
    while frontier:
        for row in children.get(frontier.pop(), []):
            frontier.append(row.pid)
            if not row.zombie:
                found.add(row.pid)
    return found


def in_sessions(sessions: Iterable[int]) -> set[int]:
    """Living processes of these sessions."""
    wanted = set(sessions)
    return {row.pid for row in table() if row.session in wanted and not row.zombie}


def marked(run_directory: Path) -> set[int]:
    """Living processes whose environment names this run directory."""
    wanted = f"{MARKER}={run_directory}".encode()
    found = set()
    for row in table():
        with contextlib.suppress(OSError):
            if not row.zombie and wanted in Path(f"/proc/{row.pid}/environ").read_bytes().split(b"\0"):
                found.add(row.pid)
    return found - {os.getpid()}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signals each process that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_all(find: Callable[[], set[int]], rounds: int = 50) -> set[int]:
    """Kills what `find` finds until it finds nothing (children may be born meanwhile); all that were killed."""
    killed: set[int] = set()
    for _ in range(rounds):
        found = find()
        if not found:
            break
        killed |= found
        send(found, signal.SIGKILL)
        for pid in found:
            _wait_gone(pid)
    return killed


def _wait_gone(pid: int, timeout_ms: int = 1000) -> None:
    with contextlib.suppress(ProcessLookupError, OSError):
        descriptor = os.pidfd_open(pid)
        try:
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_ms)
        finally:
            os.close(descriptor)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Named shared-memory objects that these processes map or hold open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith(_SHARED_MEMORY) and not name.endswith(" (deleted)"):
                    found.add(Path(name))
    return found


def semaphores_since(start: float) -> set[Path]:
    """Semaphores of Python's multiprocessing that processes of this user made after `start`, in seconds since 1970.

    A process that is killed with its resource tracker leaves them, and nothing tells whose they were; but one that no
    living process maps is of no use to anybody.
    """
    found = set()
    for path in Path(_SHARED_MEMORY).glob("sem.mp-*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= start:
                found.add(path)
    return found


def remove_shared_memory(names: set[Path]) -> None:
    """Unlinks those of `names` that exist and that no living process maps."""
    existing = {name for name in names if name.exists()}
    if existing:
        for name in existing - shared_memory_of(row.pid for row in table()):
            name.unlink(missing_ok=True)


def adopt_orphans() -> None:
    """From now on orphaned descendants become this process's children, whatever session they moved to."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """This process gets SIGTERM when the one that started it dies; survives exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
