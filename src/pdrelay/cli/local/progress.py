"""Progress of a deployment: a line for each part that became ready or ended, and on a terminal what is awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from pdrelay.cli.local.rundir import PartState, RunState, exit_text


class Progress:
    """Shows states as they come; each news once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: set[tuple[str, str]] = set()
        self._status: Status | None = None
        self._waiting: list[str] = []
        self._begun = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts, a terminal shows what is awaited and for how long."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("starting", spinner="line") as self._status:
            yield
        self._status = None

    def show(self, state: RunState) -> None:
        """Prints what is new in `state`."""
        for part in state.parts:
            if part.ready_after is not None:
                self._tell(part, "ready", f"after {part.ready_after:5.1f} s  {part.address}")
            if part.condition == "exited":
                self._tell(part, "ended", f"{exit_text(part.exit_code)}: {part.last_line}")
        self._waiting = [part.name for part in state.parts if part.condition == "starting"]
        self.tick()

    def tick(self) -> None:
        """Brings the elapsed time up to date."""
        if self._status is not None:
            elapsed = time.monotonic() - self._begun
            self._status.update(f"waiting for {', '.join(self._waiting) or 'the supervisor'} ({elapsed:.0f} s)")

    def _tell(self, part: PartState, news: str, text: str) -> None:
        if (part.name, news) not in self._told:
            self._told.add((part.name, news))
            self._console.print(f"{part.name:10} {news} {text}", markup=False, soft_wrap=True)
