"""What a result must say of where and when it was measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pdrelay import __version__


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the moment."""

    date: str
    pdrelay: str
    python: str
    kernel: str
    processor: str
    cores: int
    load_before: float  # one minute's average at the start: what else was running


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        pdrelay=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        load_before=round(os.getloadavg()[0], 2),
    )


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.machine()
