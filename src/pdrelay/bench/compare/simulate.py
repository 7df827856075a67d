"""The same comparison in the simulator: the same requests, profiles, line and policies."""

from __future__ import annotations

from pathlib import Path

from pdrelay.bench.compare.experiment import POLICY_FILE, PREFILLS, Experiment
from pdrelay.bench.compare.rows import Row, simulated
from pdrelay.cluster.config import PolicySettings
from pdrelay.cluster.topology import Role
from pdrelay.cluster.units import parse_size, parse_time
from pdrelay.depot.flow_control import seconds_ahead
from pdrelay.engine.emulated.steps import SLICES
from pdrelay.perf.instance import from_profile
from pdrelay.perf.profile import load
from pdrelay.policy.handoff import RelayBound, Settings
from pdrelay.policy.named import policy_of
from pdrelay.sim.line import LineSpec
from pdrelay.sim.record import Record
from pdrelay.sim.scenario import InstanceSpec, Scenario
from pdrelay.sim.simulation import Simulation

CONNECTIONS = 4  # of the link's configuration
WIRE_RATIO = 1.06
"""Bytes on the line for each byte of KV: frames, TLS, TCP and IP headers. Those that results count are without."""


def simulate(experiment: Experiment, name: str, profiles: dict[Role, Path], arena: str) -> list[Row]:
    """One policy, in real seconds as it is played; the rows are in the evaluation's."""
    speed = experiment.speed
    requests = [request._replace(arrival=request.arrival / speed) for request in experiment.trace()]
    records: list[Record] = []
    simulation = Simulation(_scenario(experiment, name, profiles, arena), records.append)
    simulation.run(iter(requests), len(requests))
    return sorted((simulated(record, speed, WIRE_RATIO) for record in records), key=lambda row: row.number)


def _scenario(experiment: Experiment, name: str, profiles: dict[Role, Path], arena: str) -> Scenario:
    policy, handoff = POLICY_FILE[name]
    settings = PolicySettings(name=policy, handoff=handoff, relay_max_tokens=10**6, relay_max_time="1000000s")
    prefill, decode = (from_profile(load(profiles[role])) for role in (Role.PREFILL, Role.DECODE))
    beside = {Role.RELAY, Role.DECODE} if policy == "idc_pd" else {Role.RELAY}
    instances = [
        InstanceSpec(f"p-{number}", "a", frozenset({Role.PREFILL}), prefill, depot="near") for number in range(PREFILLS)
    ]
    instances.append(InstanceSpec("rld-0", "a", frozenset(beside), decode, depot="near"))
    instances.append(InstanceSpec("md-0", "b", frozenset({Role.DECODE}), decode, depot="far"))
    bound = RelayBound(settings.relay_max_tokens, parse_time(settings.relay_max_time))
    size = float(parse_size(arena))
    rate, rtt = experiment.real_line_rate, experiment.rtt / experiment.speed
    line = LineSpec(
        rate, rtt, CONNECTIONS, discipline="srpt", under_way=seconds_ahead(rate, rtt), wire_ratio=WIRE_RATIO
    )  # fmt: skip
    return Scenario(
        instances=tuple(instances),
        lines={("a", "b"): line},
        policy=policy_of(settings),
        handoff=Settings(handoff, bound, settings.relay_pace),
        depots={"near": size, "far": size},
        slices=min(SLICES, load(profiles[Role.PREFILL]).kv.layers),
    )
