"""Placement policies: PDD, and the two baselines of its evaluation.

Source: PDD section "pipeline orchestration": only P-MD and P-RLD-MD are used, P-RLD never, because a relay may not be
occupied without bound and MainDecode's prefix cache must stay in step with prefill's. While no MainDecode is healthy,
requests are placed P-RLD-MD all the same: the relay decodes, and MainDecode takes over if it comes back in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pdrelay.cluster.topology import Role
from pdrelay.errors import PlacementError
from pdrelay.policy.base import InstanceView, Pipeline, Placement, RequestView, Snapshot
from pdrelay.policy.cost import weigh


class NoState(NamedTuple):
    """These policies remember nothing."""


class Pdd:
    """High hit rates go P-MD, and so does what the line carries soon; the rest is relayed meanwhile."""

    def __init__(
        self,
        hit_threshold: float = 0.95,
        relay_pressure: float = 0.9,
        wan_budget: float = 0.0,
        *,
        recompute: bool = False,
    ) -> None:
        """`hit_threshold` is PDD's H; a relay whose KV cache is fuller than `relay_pressure` gets no new requests.

        What the line is predicted to carry in `wan_budget` seconds, behind what waits for it now, needs no relay.
        `recompute` lets a prefill instance beside main decode compute the prompt when that is sooner than sending it.
        """
        self.hit_threshold, self.relay_pressure = hit_threshold, relay_pressure
        self.wan_budget, self.recompute = wan_budget, recompute

    def initial(self) -> NoState:
        return NoState()

    def place(self, state: NoState, request: RequestView, snapshot: Snapshot, now: float) -> tuple[NoState, Placement]:
        prefill = choose(snapshot, Role.PREFILL, request)
        main, trouble = self._main(request, snapshot, prefill.cluster)
        hit_rate = request.hit_rate(main.name)
        if main.healthy and (local := self._recomputed(request, snapshot, prefill, main)) is not None:
            return state, local
        link = snapshot.links.get((prefill.cluster, main.cluster))
        wan = link.transfer_seconds(request.missing_bytes(main.name)) if link else 0.0
        pipeline, reason = self._pipeline(request, hit_rate, trouble, wan)
        relay = None
        if pipeline is Pipeline.P_RLD_MD:
            relay, reason = self._relay(request, snapshot, prefill.cluster, reason)
            pipeline = Pipeline.P_RLD_MD if relay else Pipeline.P_MD
        if relay is None and trouble:
            raise PlacementError(trouble if request.forced else reason)
        return state, Placement(pipeline, prefill.name, relay, main.name, hit_rate, reason)

    def _main(self, request: RequestView, snapshot: Snapshot, cluster: str) -> tuple[InstanceView, str]:
        """Main decode for a prompt of `cluster`, and why it cannot be reached now; empty when it can."""
        try:
            main = choose(snapshot, Role.DECODE, request)
        except PlacementError as error:
            able = [i for i in snapshot.instances if Role.DECODE in i.roles]
            if not able:
                raise
            return _best(able, request), str(error)
        trouble = snapshot.line_trouble(cluster, main.cluster)
        return main, trouble and f"the line from {cluster} to {main.cluster} is down: {trouble}"

    def _recomputed(
        self, request: RequestView, snapshot: Snapshot, prefill: InstanceView, main: InstanceView
    ) -> Placement | None:
        """Prefill beside main decode, when that is sooner than what comes over the line."""
        if not self.recompute or request.forced not in (None, Pipeline.P_D) or prefill.cluster == main.cluster:
            return None
        line = snapshot.links.get((prefill.cluster, main.cluster))
        joined = (main.cluster, main.cluster) in snapshot.links
        for near in snapshot.instances:
            reached = near.host == main.host or (joined and near.cluster == main.cluster)
            if not (near.healthy and reached and Role.PREFILL in near.roles and near.prefill_cost):
                continue
            held = request.held.get(near.name, 0)
            size = request.missing_bytes(main.name)
            costs = weigh(request.prompt_tokens - held, held, size, line, near.prefill_cost)
            if costs.recompute_is_cheaper:
                reason = (
                    f"{near.name} computes the prompt in {costs.recompute:.2f} s, the line takes {costs.send:.2f} s"
                )
                return Placement(Pipeline.P_D, near.name, None, main.name, request.hit_rate(main.name), reason)
        return None

    def _pipeline(self, request: RequestView, hit_rate: float, trouble: str, wan: float) -> tuple[Pipeline, str]:
        if request.forced in (Pipeline.P_MD, Pipeline.P_RLD_MD):
            return request.forced, "forced"
        if trouble:
            return Pipeline.P_RLD_MD, trouble
        if hit_rate >= self.hit_threshold:
            return Pipeline.P_MD, f"hit rate {hit_rate:.3f} is at least {self.hit_threshold}"
        if self.wan_budget and wan <= self.wan_budget:
            return Pipeline.P_MD, f"the line carries what is missing in {wan:.3f} s"
        return Pipeline.P_RLD_MD, f"hit rate {hit_rate:.3f} is below {self.hit_threshold}"

    def _relay(self, request: RequestView, snapshot: Snapshot, cluster: str, reason: str) -> tuple[str | None, str]:
        """The relay beside prefill, or None and why the request goes P-MD although its hit rate is low."""
        try:
            relay = choose(snapshot, Role.RELAY, request, cluster)
        except PlacementError as error:
            if request.forced is not None:
                raise
            return None, f"{reason}, but {error}"
        if request.forced is None and relay.kv_usage >= self.relay_pressure:
            return None, f"{reason}, but {relay.name} is under pressure"
        return relay.name, reason


class CdcPd:
    """Baseline: prefill here, decode in the other datacenter, no relay."""

    def initial(self) -> NoState:
        return NoState()

    def place(self, state: NoState, request: RequestView, snapshot: Snapshot, now: float) -> tuple[NoState, Placement]:
        prefill = choose(snapshot, Role.PREFILL, request)
        main = choose(snapshot, Role.DECODE, request)
        if trouble := snapshot.line_trouble(prefill.cluster, main.cluster):
            raise PlacementError(f"the line from {prefill.cluster} to {main.cluster} is down: {trouble}")
        placement = Placement(
            Pipeline.P_MD, prefill.name, None, main.name, request.hit_rate(main.name), "cdc_pd has no relay"
        )
        return state, placement


class IdcPd:
    """Baseline: prefill and decode in one datacenter."""

    def initial(self) -> NoState:
        return NoState()

    def place(self, state: NoState, request: RequestView, snapshot: Snapshot, now: float) -> tuple[NoState, Placement]:
        prefill = choose(snapshot, Role.PREFILL, request)
        main = choose(snapshot, Role.DECODE, request, prefill.cluster)
        placement = Placement(
            Pipeline.P_D, prefill.name, None, main.name, request.hit_rate(main.name), "idc_pd decodes beside prefill"
        )
        return state, placement


def choose(snapshot: Snapshot, role: Role, request: RequestView, cluster: str | None = None) -> InstanceView:
    """The healthy instance of `role` that holds most of the prompt, least loaded among equals: with fewest requests,
    and of those with fewest prompt tokens to compute.

    Raises PlacementError that names every instance of the role and what is wrong with it.
    """
    able = [i for i in snapshot.instances if role in i.roles and cluster in (None, i.cluster)]
    healthy = [i for i in able if i.healthy]
    if not healthy:
        raise PlacementError(_nobody(role, able, cluster))
    return _best(healthy, request)


def _best(instances: Iterable[InstanceView], request: RequestView) -> InstanceView:
    return min(instances, key=lambda i: (-request.held.get(i.name, 0), i.load, i.backlog, i.name))


def _nobody(role: Role, able: Iterable[InstanceView], cluster: str | None) -> str:
    where = f" in {cluster}" if cluster else ""
    down = ", ".join(f"{i.name} ({i.cluster}) is down: {i.detail}" for i in able)
    return f"no healthy {role.value} instance{where}: {down or 'none is configured'}"
