"""Runs a workload through a deployment: the simulated world, and what it measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.policy.base import LinkView, Placement, RequestView, Snapshot
from pdrelay.sim.cache import BlockIndex
from pdrelay.sim.events import Events
from pdrelay.sim.life import Life
from pdrelay.sim.line import Line, LineSpec
from pdrelay.sim.metrics import Metrics
from pdrelay.sim.parts import Cores, Depot, Instance
from pdrelay.sim.record import Record
from pdrelay.sim.relaying import Handoffs
from pdrelay.sim.scenario import Fault, Scenario
from pdrelay.sim.timeline import Timeline
from pdrelay.workload.base import Request

OnRecord = Callable[[Record], None]
OnProgress = Callable[[int], None]


@dataclass(slots=True)
class Outcome:
    """What a simulation measured. `lines` and `engines` hold use and counters by name."""

    metrics: Metrics
    timeline: Timeline
    lines: dict[str, dict[str, float]] = field(default_factory=dict)
    engines: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {**self.metrics.as_dict(), "lines": self.lines, "instances": self.engines}


class Simulation:
    """One run. Deterministic: scenario, workload and seed decide everything."""

    def __init__(self, scenario: Scenario, on_record: OnRecord | None = None) -> None:
        self.events = Events()
        self.scenario = scenario
        self.overlap, self.slices, self.token_zero = scenario.overlap, scenario.slices, scenario.token_zero
        self.handoffs = Handoffs(scenario.handoff)
        self.index = BlockIndex()
        self._depots = {name: Depot(self.index, size) for name, size in scenario.depots.items()}
        self._cores = {name: Cores(count) for name, count in scenario.cores.items()}
        self.instances = {
            spec.name: Instance(
                self.events, self.index, spec, self._depots.get(spec.depot), self._cores.get(spec.cores)
            )
            for spec in scenario.instances
        }
        self.lines = {
            ends: Line(self.events, spec, seed=scenario.seed * 1009 + number)
            for number, (ends, spec) in enumerate(scenario.lines.items())
        }
        self._holders = {name: instance.holders for name, instance in self.instances.items()}
        self._policy_state: Any = scenario.policy.initial()
        self.metrics = Metrics(scenario.slo)
        self.lives: set[Life] = set()
        self.timeline = Timeline(self)
        self._on_record = on_record
        self._left = 0  # requests of the workload that have not arrived
        self._think = 0  # turns that will be sent later
        self._numbers = 0
        self._bytes_per_token = scenario.instances[0].profile.kv_per_token
        self._line_down = dict.fromkeys(self.lines, "")
        self._set_faults(scenario)

    def run(self, requests: Iterator[Request], count: int, on_progress: OnProgress | None = None) -> Outcome:
        """Runs the first `count` requests of the workload, later turns of their sessions not counted, to their end."""
        self._left = count
        self._next(requests)
        self.timeline.start()
        ended = 0

        def stop() -> bool:
            nonlocal ended
            if on_progress is not None and self._numbers >= ended + 1000:
                ended = self._numbers
                on_progress(ended - len(self.lives))
            return not self.lives and self.finished

        thresholds = gc.get_threshold()
        gc.set_threshold(100_000, *thresholds[1:])  # callbacks and lives make cycles, which few collections suffice for
        try:
            self.events.run(stop=stop)
        finally:
            gc.set_threshold(*thresholds)
        assert not self.lives, f"INV-SIM-END: {[life.record.as_dict() for life in self.lives]}"
        return self._outcome()

    @property
    def finished(self) -> bool:
        """True when no request is left or to come."""
        return not self._left and not self.lives and not self._think

    # ---- arrivals ----

    def _next(self, requests: Iterator[Request]) -> None:
        request = next(requests, None) if self._left else None
        if request is None:
            self._left = 0
            return
        if request.arrival < self.events.now:
            raise ConfigError(
                f"workload: found arrival {request.arrival} after {self.events.now}, expected rising ones"
            )
        self.events.at(request.arrival, lambda: self._arrive(request, requests))

    def _arrive(self, request: Request, requests: Iterator[Request]) -> None:
        self._left -= 1
        self._next(requests)
        self._send(request)

    def _send(self, request: Request) -> None:
        life = Life(self, self._numbers, request, self.events.now)
        self._numbers += 1
        self.lives.add(life)
        if self.scenario.front:
            self.events.after(self.scenario.front, life.start)
        else:
            life.start()

    def ended(self, life: Life) -> None:
        """A request has ended: its session's next turn follows."""
        self.lives.discard(life)
        self.metrics.add(life.record)
        if self._on_record is not None:
            self._on_record(life.record)
        following = life.request.then
        if following is not None and life.record.status == "ok":
            self._think += 1
            self.events.after(following.think, lambda: self._send_turn(following))

    def _send_turn(self, request: Request) -> None:
        self._think -= 1
        self._send(request)

    # ---- the world around a request ----

    def place(self, request: Request) -> tuple[Placement, dict[str, int]]:
        """Asks the policy; also the prompt tokens that each instance holds. Raises PlacementError."""
        held = self._held(request)
        view = RequestView(prompt_tokens=request.prompt, held=held, kv_bytes_per_token=self._bytes_per_token)
        policy = self.scenario.policy
        self._policy_state, placement = policy.place(self._policy_state, view, self.snapshot(), self.events.now)
        return placement, held

    def _held(self, request: Request) -> dict[str, int]:
        held = self.index.held(request, self._holders)
        if request.cached < 0 or not self.scenario.cached:
            return held
        share = self.scenario.cached
        return {name: int(n * share.get(self.instances[name].cluster, 1.0)) for name, n in held.items()}

    def snapshot(self) -> Snapshot:
        """The deployment as a policy sees it."""
        links = {
            ends: LinkView(line.spec.rate, line.spec.rtt, self._line_down[ends], line.backlog)
            for ends, line in self.lines.items()
        }
        return Snapshot(tuple(instance.view() for instance in self.instances.values()), links)

    def instance(self, name: str) -> Instance:
        """The instance called `name`."""
        return self.instances[name]

    def spare_relay(self, cluster: str) -> Instance | None:
        """The first healthy relay of `cluster`, as the gateway chooses it."""
        able = (i for i in self.instances.values() if i.cluster == cluster and Role.RELAY in i.spec.roles)
        return next((instance for instance in able if not instance.down), None)

    def line(self, source: str, target: str) -> Line | None:
        """The line between two clusters; None where KV moves in no time."""
        line = self.lines.get((source, target))
        if line is None and source != target:
            raise ConfigError(f"line: found none from {source} to {target}, expected one in the scenario")
        return line

    # ---- faults ----

    def _set_faults(self, scenario: Scenario) -> None:
        for fault in scenario.faults:
            if fault.instance not in self.instances:
                known = ", ".join(self.instances)
                raise ConfigError(f"fault.instance: found {fault.instance!r}, expected one of {known}")
            self._set_fault(self.instances[fault.instance], fault)
        for ends, spec in scenario.lines.items():
            self._set_outages(ends, spec, scenario.line_notice)

    def _set_fault(self, instance: Instance, fault: Fault) -> None:
        def fail() -> None:
            for life in sorted(self.lives, key=lambda life: life.record.number):
                life.lost(instance)
            instance.fail()

        self.events.at(fault.at, fail)
        self.events.at(fault.at + fault.lasts, instance.restore)

    def _set_outages(self, ends: tuple[str, str], spec: LineSpec, notice: float) -> None:
        def say(text: str) -> Callable[[], None]:
            def run() -> None:
                self._line_down[ends] = text

            return run

        for start, end in spec.outages:
            if end - start > notice:
                self.events.at(start + notice, say("no connection"))
                self.events.at(end, say(""))

    # ---- results ----

    def _outcome(self) -> Outcome:
        self.timeline.stop()
        outcome = Outcome(self.metrics, self.timeline)
        duration = max(self.events.now - min(self.metrics.first_arrival, self.events.now), 1e-9)
        for (source, target), line in self.lines.items():
            line.settle()
            outcome.lines[f"{source}->{target}"] = {
                "rate": line.spec.rate,
                "sent_bytes": line.sent,
                "utilisation": line.sent / line.could_send if line.could_send else 0.0,
                "connection_utilisation": line.connection_seconds / duration / line.spec.connections,
                "transfers": line.transfers,
            }
        for name, instance in self.instances.items():
            busy = sum(engine.busy_seconds for engine in instance.engines)
            outcome.engines[name] = {
                "busy": busy / duration / len(instance.engines),
                "output_tokens": instance.output_tokens(),
                "preemptions": sum(engine.preemptions for engine in instance.engines),
                "evicted_blocks": instance.cache.evicted,
            }
        return outcome
