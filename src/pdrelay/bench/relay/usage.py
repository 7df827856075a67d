"""What a process and those that it started use."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """CPU seconds so far, and resident memory in bytes."""

    cpu_seconds: float
    memory: int


def usage_of(pid: int) -> Usage:
    """Of process `pid` and its descendants that live; nothing when it has ended."""
    cpu, memory = 0.0, 0
    for process in _family(pid):
        with contextlib.suppress(OSError):
            # clock_getcpuclockid(3) makes the number of another process's CPU clock in this way.
            cpu += time.clock_gettime((~process << 3) | 2)
            memory += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    return Usage(cpu, memory)


def _family(pid: int) -> list[int]:
    found = [pid]
    for process in found:
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in path.read_text().split()]
    return found
