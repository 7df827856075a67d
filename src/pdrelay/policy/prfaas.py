"""PrfaaS's placement: long uncached prompts are prefilled in another cluster, short ones beside main decode.

Source: PrfaaS, sections 3.3 and 3.4.3, in the static form: the threshold t is given. While bandwidth is scarce the
uncached length is reckoned with main decode's own cluster alone; while it is abundant with the best cache of all
clusters, and a prefix that another cluster holds is worth sending to where it is used.

Everything after prefill is as in the other policies, which place the request once its prefill cluster is chosen: with
`hit_threshold` above 0 a relay beside the remote prefill masks the line, as in PDD (the unified policy).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.policy.base import InstanceView, Pipeline, Placement, PlacementPolicy, RequestView, Snapshot
from pdrelay.policy.placement import CdcPd, IdcPd, NoState, Pdd, choose

Bandwidth = Literal["scarce", "abundant"]

LINE_SLACK = 1.0
"""Seconds that a cluster's line may be behind the least loaded one before the cluster is left out."""

LOAD_SLACK = 1
"""Requests that a cluster's least loaded instance may have more than the least loaded of all: the best cache must not
draw all requests while another cluster is idle."""


class Prfaas:
    """Remote prefill above the threshold, local prefill up to it."""

    def __init__(
        self,
        threshold: float,
        bandwidth: Bandwidth = "scarce",
        *,
        hit_threshold: float = 0.0,
        wan_budget: float = 0.0,
        relay_pressure: float = 0.9,
    ) -> None:
        """`threshold` is the paper's t in tokens; `hit_threshold` PDD's H, 0 for no relay."""
        self.threshold, self.bandwidth = threshold, bandwidth
        self._local: PlacementPolicy[Any] = IdcPd()
        self._remote: PlacementPolicy[Any] = CdcPd()
        if hit_threshold:
            self._remote = Pdd(hit_threshold, relay_pressure, wan_budget)

    def initial(self) -> NoState:
        return NoState()

    def place(self, state: NoState, request: RequestView, snapshot: Snapshot, now: float) -> tuple[NoState, Placement]:
        main = choose(snapshot, Role.DECODE, request)
        sides = _Sides.of(snapshot, main.cluster)
        uncached, cached_at = self._uncached(request, sides)
        remote, reason = self._goes(request, sides, uncached)
        chosen = _only(snapshot, sides.remote if remote else sides.local, main) if sides.able else snapshot
        policy = self._remote if remote else self._local
        _, placement = policy.place(policy.initial(), request, chosen, now)
        if placement.relay:
            reason = f"{reason}; {placement.reason}"
        cache = _worth_sending(request, snapshot, cached_at, placement.prefill)
        return state, placement._replace(reason=reason, cache_from=cache)

    def _uncached(self, request: RequestView, sides: _Sides) -> tuple[int, str]:
        """Tokens that have to be prefilled, and in the abundant form the instance that holds most of the prompt."""
        local = max((request.held.get(i.name, 0) for i in sides.local), default=0)
        if self.bandwidth == "scarce":
            return request.prompt_tokens - local, ""
        holders = [i for i in (*sides.local, *sides.remote) if i.healthy]
        best = max(holders, key=lambda i: request.held.get(i.name, 0), default=None)
        held = request.held.get(best.name, 0) if best is not None else 0
        return request.prompt_tokens - held, best.name if best is not None and held else ""

    def _goes(self, request: RequestView, sides: _Sides, uncached: int) -> tuple[bool, str]:
        """Whether prefill is remote, and why."""
        if request.forced in (Pipeline.P_MD, Pipeline.P_RLD_MD):
            return True, "forced"
        if request.forced is Pipeline.P_D:
            return False, "forced"
        able_here = any(i.healthy for i in sides.local)
        able_there = any(i.healthy for i in sides.remote)
        if uncached > self.threshold:
            if able_there or not able_here:
                return True, f"{uncached} uncached tokens are more than {self.threshold:g}"
            return False, f"{uncached} uncached tokens are more than {self.threshold:g}, but nobody prefills remotely"
        if able_here or not able_there:
            return False, f"{uncached} uncached tokens are at most {self.threshold:g}"
        return True, f"{uncached} uncached tokens are at most {self.threshold:g}, but nobody prefills beside decode"


class _Sides(NamedTuple):
    """Prefill instances beside main decode, and in clusters with a line to it that works."""

    local: tuple[InstanceView, ...]
    remote: tuple[InstanceView, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, home: str) -> _Sides:
        """Both sides of `home`, the cluster of main decode."""
        prefill = [i for i in snapshot.instances if Role.PREFILL in i.roles]
        away = [i for i in prefill if i.cluster != home and not snapshot.line_trouble(i.cluster, home)]
        waits = {i.cluster: _queued(snapshot, i.cluster, home) for i in away if i.healthy}
        least = min(waits.values(), default=0.0)
        near = [i for i in away if waits.get(i.cluster, 0.0) <= least + LINE_SLACK]
        return cls(tuple(i for i in prefill if i.cluster == home), _not_behind(near))

    @property
    def able(self) -> bool:
        """Whether anybody can prefill at all."""
        return any(i.healthy for i in (*self.local, *self.remote))


def _worth_sending(request: RequestView, snapshot: Snapshot, holder: str, prefill: str) -> str:
    """`holder`, when it has more of the prompt than `prefill` has and a line from one to the other works."""
    if request.held.get(holder, 0) <= request.held.get(prefill, 0):
        return ""
    clusters = {i.name: i.cluster for i in snapshot.instances}
    link = snapshot.links.get((clusters[holder], clusters[prefill]))
    return holder if link is not None and not link.down and clusters[holder] != clusters[prefill] else ""


def _not_behind(instances: list[InstanceView]) -> tuple[InstanceView, ...]:
    """Instances of the clusters that have about as little to do as the idlest one, and those that are down."""
    loads: dict[str, int] = {}
    for instance in instances:
        if instance.healthy:
            loads[instance.cluster] = min(instance.load, loads.get(instance.cluster, instance.load))
    most = min(loads.values(), default=0) + LOAD_SLACK
    return tuple(i for i in instances if loads.get(i.cluster, 0) <= most)


def _queued(snapshot: Snapshot, source: str, target: str) -> float:
    link = snapshot.links.get((source, target))
    return link.queued / link.rate if link is not None and link.rate else 0.0


def _only(snapshot: Snapshot, prefills: Iterable[InstanceView], main: InstanceView) -> Snapshot:
    """The deployment without other prefill instances, and with decode in main's cluster only."""
    names = {i.name for i in prefills}
    kept = []
    for instance in snapshot.instances:
        others = Role.RELAY in instance.roles or (Role.DECODE in instance.roles and instance.cluster == main.cluster)
        if instance.name in names:
            kept.append(instance)
        elif others:
            kept.append(instance._replace(roles=instance.roles - {Role.PREFILL}))
    return snapshot._replace(instances=tuple(kept))
