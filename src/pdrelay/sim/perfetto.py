"""Phases of requests in the trace event format of Perfetto and chrome://tracing.

One process for each instance and one for the line; one track for each request that it has at the same time.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import IO, Any

from pdrelay.errors import ConfigError
from pdrelay.sim.record import Record

Span = tuple[str, str, float, float]
"""Process, name, start and end."""


class PerfettoWriter:
    """Writes records as they come; close it at the end."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when `path` cannot be written."""
        try:
            self._file: IO[str] = path.open("w")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._first = True
        self._processes: dict[str, int] = {}
        self._spans: list[Span] = []

    def add(self, record: Record) -> None:
        """Keeps the spans of one request until they can be given tracks."""
        for process, name, start, end in _spans(record):
            if not isnan(start) and not isnan(end) and end >= start:
                self._spans.append((process, f"{name} {record.number}", start, end))

    def close(self) -> None:
        """Writes everything."""
        self._spans.sort(key=lambda span: span[2])
        tracks: dict[str, tuple[list[tuple[float, int]], list[int]]] = {}
        for process, name, start, end in self._spans:
            busy, free = tracks.setdefault(process, ([], []))
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            track = heapq.heappop(free) if free else len(busy) + 1
            heapq.heappush(busy, (end, track))
            self._event(name=name, ph="X", ts=start * 1e6, dur=(end - start) * 1e6, pid=self._pid(process), tid=track)
        self._file.write("\n]}\n")
        self._file.close()

    def _pid(self, process: str) -> int:
        if process not in self._processes:
            pid = self._processes[process] = len(self._processes) + 1
            self._event(name="process_name", ph="M", pid=pid, args={"name": process})
        return self._processes[process]

    def _event(self, **event: Any) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False


def _spans(record: Record) -> Iterator[Span]:
    yield record.prefill, "prefill", record.prefill_start, record.prefill_end
    yield "line", "transfer", record.transfer_start, record.kv_ready
    relayed = not isnan(record.relay_start)
    handed_over = not isnan(record.handoff_start)
    if relayed and record.relay is not None:
        yield record.relay, "relay", record.relay_start, record.handoff_start if handed_over else record.finished
    if handed_over:
        yield record.main, "extend", record.handoff_start, record.handoff_done
        yield record.main, "decode", record.handoff_done, record.finished
    elif not relayed:
        yield record.main, "decode", record.kv_ready, record.finished
