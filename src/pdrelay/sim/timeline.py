"""Samples of a simulation over time, in bounded memory: when there are many, every second one goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.sim.events import Event

if TYPE_CHECKING:
    from pdrelay.sim.simulation import Simulation

MOST = 1000
"""Samples that are kept."""


class Sample(NamedTuple):
    """The deployment at one moment. Rates are means since the sample before."""

    time: float
    line_bytes: dict[str, float]  # sent so far
    line_queue: int  # transfers that wait for a connection
    prefill_queue: int
    decode_running: int
    decode_queue: int
    relay_running: int
    relay_tokens: int  # made so far
    main_tokens: int


class Timeline:
    """Takes samples every so often; the interval doubles when there are too many."""

    def __init__(self, simulation: Simulation, interval: float = 0.05) -> None:
        self._simulation, self._interval = simulation, interval
        self._event: Event | None = None
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Takes the first sample."""
        self._take()

    def stop(self) -> None:
        """Takes the last one."""
        if self._event is not None:
            self._event.cancel()
        self.samples.append(self._sample())

    def _take(self) -> None:
        self.samples.append(self._sample())
        if len(self.samples) >= MOST:
            del self.samples[1::2]
            self._interval *= 2
        # With nothing else to come nothing changes any more: samples must not keep the clock going.
        events = self._simulation.events
        self._event = events.after(self._interval, self._take) if events.pending or not events.now else None

    def _sample(self) -> Sample:
        simulation = self._simulation
        for line in simulation.lines.values():
            line.settle()
        by_role = {role: [i for i in simulation.instances.values() if role in i.spec.roles] for role in Role}
        engines = {role: [e for i in found for e in i.engines] for role, found in by_role.items()}
        return Sample(
            time=simulation.events.now,
            line_bytes={f"{a}->{b}": line.sent for (a, b), line in simulation.lines.items()},
            line_queue=sum(line.queue for line in simulation.lines.values()),
            prefill_queue=sum(e.waiting + max(0, e.running - 1) for e in engines[Role.PREFILL]),
            decode_running=sum(e.running for e in engines[Role.DECODE]),
            decode_queue=sum(e.waiting for e in engines[Role.DECODE]),
            relay_running=sum(e.running for e in engines[Role.RELAY]),
            relay_tokens=sum(i.output_tokens() for i in by_role[Role.RELAY]),
            main_tokens=sum(i.output_tokens() for i in by_role[Role.DECODE]),
        )
