"""Places requests and runs them: the real `Generator`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.topology import Instance, Role
from pdrelay.cluster.units import parse_size, parse_time
from pdrelay.depot.base import DepotControl, Forgotten, LinkEstimate, LinkState, Removed, Stalled, Stored
from pdrelay.engine.base import Engine
from pdrelay.engine.messages import Hello
from pdrelay.errors import DepotUnavailableError, PlacementError, RequestError
from pdrelay.gateway.agreement import AgreementMonitor
from pdrelay.gateway.base import GenerationRequest, InstanceState, Serving, ServingConnector
from pdrelay.gateway.fleet import Fleet, fleet_of
from pdrelay.gateway.handoff import Handoffs
from pdrelay.gateway.index import PageIndex
from pdrelay.gateway.legs import Notice
from pdrelay.gateway.lines import Lines
from pdrelay.gateway.places import Occupancy, Places
from pdrelay.gateway.request import RequestRun
from pdrelay.gateway.route import Route
from pdrelay.gateway.transfer import request_of
from pdrelay.kv.contract import KVContract
from pdrelay.kv.demand import demand, published_tokens
from pdrelay.kv.names import PromptPages, Scope, prompt_pages, root
from pdrelay.perf.profile import load
from pdrelay.policy.base import InstanceView, Placement, RequestView, Snapshot
from pdrelay.policy.handoff import RelayBound, Settings
from pdrelay.policy.named import policy_of


class Coordinator:
    """All requests of one gateway process."""

    def __init__(
        self,
        deployment: Deployment,
        engines: Mapping[str, Engine],
        depots: Mapping[str, DepotControl],
        connectors: Mapping[str, ServingConnector] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`engines` by instance name, `depots` by host name; `connectors` reach the instances' serving layers.

        `registry` takes the metrics of what only the coordinator sees.
        """
        self._deployment, self._engines, self._depots = deployment, engines, depots
        self._connectors = connectors or {}
        self._instances = {instance.name: instance for instance in deployment.instance}
        self._roles = {instance.name: frozenset(instance.roles) for instance in deployment.instance}
        self._policy = policy_of(deployment.policy)
        self._policy_state = self._policy.initial()
        self._adapters = {adapter.name: adapter.identity for adapter in deployment.adapter}
        self._index = PageIndex()
        self._lines = Lines(deployment)
        profiled = [i for i in deployment.instance if i.profile and deployment.policy.recompute]
        self._prefill_costs = {instance.name: load(Path(instance.profile)).prefill for instance in profiled}
        self._running: dict[str, RequestRun] = {}
        self._occupancy = Occupancy()
        settings = deployment.policy
        bound = RelayBound(settings.relay_max_tokens, parse_time(settings.relay_max_time))
        self._handoffs = Handoffs(Settings(settings.handoff, bound, settings.relay_pace))
        self._agreement = AgreementMonitor(settings.agreement_alarm, registry)
        self._hellos: list[Hello] = []
        self._known: Fleet | None = None  # what they say
        self._smallest_arena = min(parse_size(host.arena) for host in deployment.host)
        self._listeners = [asyncio.create_task(self._listen(host, depot)) for host, depot in depots.items()]

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, the least of all engines that are known."""
        fleet = self._fleet
        return fleet.max_model_len if fleet is not None else self._deployment.model.max_model_len

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt whose pages fit into every depot's arena."""
        fleet = self._fleet
        return fleet.max_prompt_tokens if fleet is not None else self._deployment.model.max_model_len

    def serving(self) -> Serving | None:
        """A serving layer, beside the gateway if one is; None when no instance has one.

        Raises PlacementError when all that have one are down.
        """
        home, able, down = self._deployment.gateway.cluster, [], []
        for view in self._snapshot().instances:
            hello = self._engines[view.name].status.hello
            if hello is None or hello.parsers is None or view.name not in self._connectors:
                continue
            if view.healthy:
                key = view.cluster != home, view.load, view.name
                able.append((key, Serving(view.name, hello.parsers, self._connectors[view.name])))
            else:
                down.append(f"{view.name} ({view.cluster}) is down: {view.detail}")
        if down and not able:
            raise PlacementError(f"no healthy instance has a serving layer: {', '.join(down)}")
        return min(able)[1] if able else None

    def generate(self, request: GenerationRequest) -> RequestRun:
        """Places one request. Raises PlacementError naming what is down."""
        fleet = self._reached()
        groups = fleet.contract.groups
        snapshot = self._snapshot()
        pages = self._name_pages(request, fleet.contract)
        held = {
            name: self._index.usable(pages, groups, instance.host, name) for name, instance in self._instances.items()
        }
        view = RequestView(
            prompt_tokens=len(request.prompt),
            held=held,
            forced=request.debug.pipeline,
            kv_bytes_per_token=fleet.kv_bytes_per_token,
        )
        self._policy_state, placement = self._policy.place(self._policy_state, view, snapshot, time.monotonic())

        if request.debug.pipeline not in (None, placement.pipeline):
            raise RequestError(
                f"pdrelay.pipeline: the policy {self._deployment.policy.name} places requests "
                f"{placement.pipeline.value!r}, found {request.debug.pipeline.value!r}.",
                param="pdrelay.pipeline",
                code="debug_control",
            )

        uncached = len(request.prompt) - held[placement.cache_from or placement.prefill]
        used = [placement.prefill, placement.main, *([placement.relay] if placement.relay else [])]
        run = RequestRun(
            request,
            demand(pages, groups),
            self._route(placement),
            Places(self._occupancy, used, placement.prefill, uncached),
            on_close=lambda: self._forget(request.request_id),
        )
        self._running[request.request_id] = run
        return run

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def health(self) -> list[InstanceState]:
        """All instances."""
        return [
            InstanceState(
                view.name,
                view.cluster,
                sorted(role.value for role in view.roles),
                view.healthy,
                view.detail,
                self._agreement.alarm(view.name),
            )
            for view in self._snapshot().instances
        ]

    async def aclose(self) -> None:
        """Ends all requests and connections."""
        for run in list(self._running.values()):
            await run.aclose()
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for engine in self._engines.values():
            await engine.aclose()
        for depot in self._depots.values():
            await depot.aclose()

    # ---- placement ----

    @property
    def _fleet(self) -> Fleet | None:
        """What the engines that have been reached say; None before the first has. Every request asks several times."""
        hellos = [hello for engine in self._engines.values() if (hello := engine.status.hello) is not None]
        if hellos != self._hellos:
            self._hellos, self._known = hellos, fleet_of(hellos, self._smallest_arena) if hellos else None
        return self._known

    def _reached(self) -> Fleet:
        """The same. Raises PlacementError."""
        fleet = self._fleet
        if fleet is None:
            details = ", ".join(f"{state.instance}: {state.detail}" for state in self.health())
            raise PlacementError(f"no engine has been reached yet ({details})")
        return fleet

    def _name_pages(self, request: GenerationRequest, contract: KVContract) -> PromptPages:
        key = self._fleet_key()
        lora = self._adapters.get(request.lora, "")
        scope = Scope(contract.model, contract.revision, lora, request.cache_salt)
        published = request.prompt[: published_tokens(len(request.prompt), contract.groups)]
        return prompt_pages(published, contract.page_tokens, root(scope, key), key)

    def _fleet_key(self) -> bytes:
        """The same at every depot: from any that has been reached."""
        for depot in self._depots.values():
            with suppress(DepotUnavailableError):
                return depot.fleet_key
        details = ", ".join(f"{host}: {depot.trouble}" for host, depot in self._depots.items())
        raise PlacementError(f"no depot has been reached yet ({details})")

    def _snapshot(self) -> Snapshot:
        instances = tuple(self._view(instance) for instance in self._deployment.instance)
        return Snapshot(instances, self._lines.views())

    def _view(self, instance: Instance) -> InstanceView:
        status = self._engines[instance.name].status
        load, detail = status.load, status.detail
        trouble = self._depots[instance.host].trouble
        if status.healthy and trouble:  # it can neither load nor publish pages
            detail = f"its depot {instance.host} is down: {trouble}"
        return InstanceView(
            name=instance.name,
            cluster=instance.cluster,
            roles=self._roles[instance.name],
            healthy=status.healthy and not trouble,
            detail=detail,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            kv_usage=load.kv_usage if load else 0.0,
            prefill_cost=self._prefill_costs.get(instance.name),
            host=instance.host,
            assigned=self._occupancy.requests[instance.name],
            counted=status.counted,
            backlog=self._occupancy.backlog[instance.name],
        )

    def _route(self, placement: Placement) -> Route:
        prefill, main = self._instances[placement.prefill], self._instances[placement.main]
        spare = placement.relay or self._spare_relay(prefill.cluster)
        return Route(
            placement=placement,
            prefill=self._engines[prefill.name],
            relay=self._engines[spare] if spare else None,
            main=self._engines[main.name],
            depot=self._depots[prefill.host],
            main_depot=main.host if main.host != prefill.host else None,
            handoffs=self._handoffs,
            agreement=self._agreement,
            round_trip=self._round_trip(main.cluster),
            relay_depot=self._relay_depot(prefill, placement.relay),
        )

    def _relay_depot(self, prefill: Instance, relay: str | None) -> str | None:
        """The depot that the relay's pages must be sent to; None where it is prefill's, or no link leads there."""
        if relay is None or (host := self._instances[relay].host) == prefill.host:
            return None
        linked = self._deployment.link_between(prefill.cluster, self._instances[relay].cluster)
        return host if linked is not None else None

    def _round_trip(self, cluster: str) -> float:
        """Seconds from the gateway to an instance of `cluster` and back; 0 inside the gateway's own."""
        return self._lines.rtt(self._deployment.gateway.cluster, cluster)

    def _spare_relay(self, cluster: str) -> str | None:
        """A relay that can rescue a request of `cluster`; the baselines have none."""
        if self._deployment.policy.name not in ("pdd", "unified"):
            return None
        able = [i.name for i in self._instances.values() if i.cluster == cluster and Role.RELAY in i.roles]
        return next((name for name in able if self._engines[name].status.healthy), None)

    # ---- events of the depots ----

    async def _listen(self, host: str, depot: DepotControl) -> None:
        async for event in depot.events():
            match event:
                case Stored() | Removed() | Forgotten():
                    self._index.apply(event)
                    if event == Forgotten(host):
                        self._lines.forget(host)
                        self._notify(Notice.DEPOT_DOWN, source=host)
                        self._notify(Notice.MAIN_DEPOT_DOWN, target=host)
                case LinkState(to, up):
                    self._lines.state(host, event)
                    if not up:
                        self._notify(Notice.LINE_DOWN, host, to)
                case LinkEstimate():
                    self._lines.estimate(host, event)
                case Stalled(xfer):
                    if run := self._running.get(request_of(xfer)):
                        run.notify(Notice.PAGES_LOST)
                case _:
                    pass

    def _notify(self, notice: Notice, source: str | None = None, target: str | None = None) -> None:
        """Tells the requests whose pages come from depot `source`, and go to `target`; None is any."""
        for run in self._running.values():
            route = run.route
            prefill_depot = self._instances[route.placement.prefill].host
            if source in (None, prefill_depot) and target in (None, route.main_depot):
                run.notify(notice)
