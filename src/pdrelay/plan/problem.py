"""What a plan is made of: pools of instances, lines, the workload, the promise, the aim. Seconds, bytes, tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.lengths import Lengths

Aim = Literal["rate", "ratio", "cost"]
"""Most goodput of what there is; most goodput for its cost; least cost for a required rate."""

Mode = Literal["representative", "distribution"]
"""Mean lengths put into the times, as the paper does; or mean times over the lengths."""

LOCAL_ONLY = math.inf
"""The threshold that offloads nothing; 0 offloads everything."""


class Pool(NamedTuple):
    """Instances of one kind in one cluster. `price` is for one instance and hour."""

    name: str
    cluster: str
    profile: InstanceProfile
    most: int  # instances that there are, or may be rented
    roles: frozenset[Role] = frozenset(Role)

    @property
    def price(self) -> float:
        """Of one instance for one hour."""
        return self.profile.price


class Wire(NamedTuple):
    """The line between two clusters."""

    rate: float  # bytes/s
    rtt: float = 0.0
    connections: int = 64
    connection_rate: float = math.inf
    wire_ratio: float = 1.0  # bytes on the line for each byte of KV, below 1 with a codec
    price: float = 0.0  # of a byte

    @property
    def usable(self) -> float:
        """Bytes/s of KV that all connections together carry."""
        return min(self.rate, self.connections * self.connection_rate) / self.wire_ratio


class Promise(NamedTuple):
    """The service level. Each time must hold for `share` of all requests; TPOT is of the mean decode step."""

    ttft: float = math.inf
    ttst: float = math.inf
    tpot: float = math.inf
    share: float = 0.9


class Problem(NamedTuple):
    """What is to be planned."""

    pools: tuple[Pool, ...]
    wires: Mapping[tuple[str, str], Wire]  # by (from, to) cluster
    lengths: Lengths
    promise: Promise = Promise()
    aim: Aim = "rate"
    rate: float = 0.0  # requests/s that are required, where the aim is `cost`
    cache: Mapping[str, float] = {}  # share of what can be hit that a cluster's cache holds; 1 where it is not named
    relay: bool = True  # relays may be placed beside remote prefill

    def cached_share(self, cluster: str) -> float:
        """How much of what could be hit the cache of `cluster` holds."""
        return self.cache.get(cluster, 1.0)

    def clusters(self, role: Role) -> list[str]:
        """Clusters that have instances for `role`, in order."""
        return list(dict.fromkeys(p.cluster for p in self.pools if role in p.roles and p.most))

    def wire(self, source: str, target: str) -> Wire | None:
        """The line; None where there is none, or none is needed."""
        return self.wires.get((source, target))


Counts = Mapping[tuple[str, Role], int]
"""Instances by (pool name, role)."""


class Plan(NamedTuple):
    """A deployment: who decodes, what is offloaded, how many instances of what.

    `threshold` is t: requests with more uncached tokens are prefilled away from `main`. `hit_threshold` is H: of those,
    requests whose hit rate is below it are relayed; 0 relays none.
    """

    main: str
    threshold: float
    counts: Counts
    hit_threshold: float = 0.0

    def of(self, pool: str, role: Role) -> int:
        """Instances of `pool` in `role`."""
        return self.counts.get((pool, role), 0)


def holding(problem: Problem) -> list[Pool]:
    """Pools whose instances hold the longest request."""
    longest = float((problem.lengths.prompt + problem.lengths.output).max()) + 1
    return [pool for pool in problem.pools if pool.profile.capacity_tokens >= longest]


def settled(problem: Problem, plan: Plan) -> Plan:
    """With the threshold that its instances imply where only one side prefills."""
    sides = {pool.cluster == plan.main for pool in problem.pools if plan.of(pool.name, Role.PREFILL)}
    if len(sides) != 1:
        return plan
    return plan._replace(threshold=LOCAL_ONLY if sides == {True} else 0.0)


def price_of(problem: Problem, counts: Counts) -> float:
    """Of all instances for an hour, without egress."""
    prices = {pool.name: pool.price for pool in problem.pools}
    return sum(prices[name] * count for (name, _), count in counts.items())


def check(problem: Problem) -> None:
    """Raises ConfigError for what no plan can be made of, naming it and the remedy."""
    for role in (Role.PREFILL, Role.DECODE):
        if not problem.clusters(role):
            raise ConfigError(f"pool: found none for {role.value}, expected one with count above 0 and that role")
    _unique(pool.name for pool in problem.pools)
    if problem.aim == "cost" and problem.rate <= 0:
        raise ConfigError(f"rate: found {problem.rate}, expected the requests/s that aim = 'cost' is for, above 0")
    if problem.aim == "ratio" and not any(pool.price > 0 for pool in problem.pools):
        raise ConfigError("aim: found 'ratio' and no price, expected a price above 0 for some profile")
    if not 0 < problem.promise.share < 1:
        raise ConfigError(f"promise.share: found {problem.promise.share}, expected a number between 0 and 1")


def _unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"pool.{name}: found the name twice, expected different names")
        seen.add(name)
