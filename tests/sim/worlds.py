"""Small deployments for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdrelay.cluster.topology import Role
from pdrelay.perf.instance import InstanceProfile, from_profile
from pdrelay.perf.profile import load, shipped
from pdrelay.policy.base import PlacementPolicy
from pdrelay.policy.handoff import Preference, RelayBound, Settings
from pdrelay.policy.placement import Pdd
from pdrelay.sim.line import LineSpec
from pdrelay.sim.record import Record
from pdrelay.sim.scenario import InstanceSpec, Scenario
from pdrelay.sim.simulation import Outcome, Simulation
from pdrelay.workload.base import Request

TINY = replace(from_profile(load(shipped("tiny-emulated"))), page_tokens=1)
"""1,024 bytes a token; 20,000 tokens/s prefill; 15 ms a step."""
WAN = LineSpec(rate=100_000.0, rtt=0.03)  # a cold prompt of 1,000 tokens takes ten seconds


def spec(name: str, cluster: str, *roles: Role, profile: InstanceProfile = TINY, **more: Any) -> InstanceSpec:
    return InstanceSpec(name, cluster, frozenset(roles), profile, **more)


def settings(preference: Preference = "one_shot", tokens: int = 10_000, seconds: float = 1e4) -> Settings:
    return Settings(preference, RelayBound(tokens, seconds))


def trio(
    policy: PlacementPolicy[Any] | None = None,
    line: LineSpec = WAN,
    *,
    profile: InstanceProfile = TINY,
    relay: bool = True,
    **more: Any,
) -> Scenario:
    instances = [spec("p", "a", Role.PREFILL, profile=profile, depot="a"), spec("m", "b", Role.DECODE, profile=profile,
                                                                               depot="b")]  # fmt: skip
    if relay:
        instances.append(spec("r", "a", Role.RELAY, profile=profile, depot="a"))
    more = {"handoff": settings(), **more}
    return Scenario(tuple(instances), {("a", "b"): line}, policy or Pdd(), **more)


def run(scenario: Scenario, *requests: Request) -> tuple[Outcome, list[Record]]:
    """The records by arrival."""
    records: list[Record] = []
    outcome = Simulation(scenario, records.append).run(iter(requests), len(requests))
    return outcome, sorted(records, key=lambda record: record.number)


ROOMY = replace(TINY, kv_capacity=1e12)
