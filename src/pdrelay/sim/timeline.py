"""Samples of a simulation over time, in bounded memory: when there are many, every second one goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.sim.events import Event

if TYPE_CHECKING:
    from pdrelay.sim.simulation import Simulation

MOST = 600
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

    def __init__(self, simulation: Simulation, interval: float = 0.2) -> None:
        self._simulation, self._interval = simulation, interval
        self._event: Event | None = None
        self._instances = {
            role: [each for each in simulation.instances.values() if role in each.spec.roles] for role in Role
        }
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
        prefill, relay, decode = (
            [engine for instance in self._instances[role] for engine in instance.engines]
            for role in (Role.PREFILL, Role.RELAY, Role.DECODE)
        )
        return Sample(
            time=simulation.events.now,
            line_bytes={f"{a}->{b}": line.sent for (a, b), line in simulation.lines.items()},
            line_queue=sum([line.queue for line in simulation.lines.values()]),
            prefill_queue=sum([engine.waiting + max(0, engine.running - 1) for engine in prefill]),
            decode_running=sum([engine.running for engine in decode]),
            decode_queue=sum([engine.waiting for engine in decode]),
            relay_running=sum([engine.running for engine in relay]),
            relay_tokens=sum([engine.output_tokens() for engine in relay]),
            main_tokens=sum([engine.output_tokens() for engine in decode]),
        )
