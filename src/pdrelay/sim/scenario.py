"""What is simulated: instances, lines, policy, faults. Sizes in bytes, times in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.perf.instance import InstanceProfile
from pdrelay.policy.base import PlacementPolicy
from pdrelay.policy.handoff import RelayBound, Settings
from pdrelay.sim.line import LineSpec


class InstanceSpec(NamedTuple):
    """One model replica. Each of its data-parallel ranks is a scheduler with `profile`; they share the prefix cache."""

    name: str
    cluster: str
    roles: frozenset[Role]
    profile: InstanceProfile  # of one rank
    ranks: int = 1
    depot: str = ""  # name of the host's depot; instances that name the same one share it
    cores: str = ""  # name of the cores that it shares with others


class Fault(NamedTuple):
    """An instance dies with everything it holds, and is back later."""

    instance: str
    at: float
    lasts: float


class ServiceLevel(NamedTuple):
    """What makes a request good."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf


class Scenario(NamedTuple):
    """A deployment and its policy."""

    instances: tuple[InstanceSpec, ...]
    lines: Mapping[tuple[str, str], LineSpec]  # by (from, to) cluster; a line to itself is the cluster's own network
    policy: PlacementPolicy[Any]
    handoff: Settings = Settings("dynamic", RelayBound(1024, 120.0))
    depots: Mapping[str, float] = {}  # arena of each depot; unbounded when it is not named
    cores: Mapping[str, float] = {}  # how many there are, by name
    faults: tuple[Fault, ...] = ()
    slo: ServiceLevel = ServiceLevel()
    overlap: bool = True  # KV leaves chunk by chunk while prefill goes on; else when it has ended
    slices: float = math.inf  # of layers in which a chunk's KV leaves: the last is there when the chunk is computed
    token_zero: bool = True  # prefill's sample is shown; else the user's first token is the first decode step's
    cached: Mapping[str, float] = {}  # share of a declared hit that a cluster's caches hold; 1 where it is not named
    front: float = 0.0  # seconds of the gateway's before prefill has a request
    line_notice: float = 3.0  # an outage is noticed so long after it began
    seed: int = 0
