"""The gateway and the simulator decide alike: what the simulator saw is shown to the gateway's own parts."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from worlds import WAN, spec
from worlds import settings as handoff_settings

from pdrelay.cluster.config import Deployment, PolicySettings
from pdrelay.cluster.topology import Role
from pdrelay.depot.base import LinkState, Stored
from pdrelay.engine.base import EngineStatus
from pdrelay.engine.messages import Hello, Load, Sampling
from pdrelay.errors import PlacementError
from pdrelay.gateway.base import Extend, GenerationRequest, Tier
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.gateway.handoff import Handoff, Handoffs, Terms
from pdrelay.gateway.splice import Splice
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.kv.names import Scope, prompt_pages, root
from pdrelay.policy import handoff as handoff_policy
from pdrelay.policy.base import Placement, PlacementPolicy, RequestView, Snapshot
from pdrelay.policy.handoff import Decision, RelayedRequest
from pdrelay.policy.named import policy_of
from pdrelay.sim import relaying
from pdrelay.sim.scenario import Fault, Scenario
from pdrelay.sim.simulation import Simulation
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.generators import AgentSessions

PAGE = 16
KEY = b"k" * 32
GROUP = KVGroup(layers=1, heads=1, head_size=1, dtype="int8", part_bytes=64, codec="c")
CONTRACT = KVContract(model="m", revision="", page_tokens=PAGE, block_tokens=PAGE, groups=(GROUP,))
INSTANCES = {
    "p-0": ("a", Role.PREFILL), "p-1": ("a", Role.PREFILL), "r": ("a", Role.RELAY),
    "d-near": ("a", Role.DECODE), "m-0": ("b", Role.DECODE), "m-1": ("b", Role.DECODE), "p-far": ("b", Role.PREFILL),
}  # fmt: skip
ONLY = {"d-near": ("idc_pd",), "p-far": ("prfaas", "unified")}  # policies that have these instances
POLICIES = {
    name: PolicySettings(name=name, threshold=1000.0)  # type: ignore[arg-type]  # names come from the table below
    for name in ("pdd", "cdc_pd", "idc_pd", "prfaas")
}
POLICIES["unified"] = PolicySettings(name="unified", threshold=300.0, hit_threshold=0.6)
POLICIES["abundant"] = PolicySettings(name="prfaas", threshold=300.0, bandwidth="abundant")
PIPELINES = {"pdd": 2, "cdc_pd": 1, "idc_pd": 1, "prfaas": 2, "unified": 3, "abundant": 2}


class Recording:
    """A policy that notes what it was asked and what it answered."""

    def __init__(self, policy: PlacementPolicy[Any]) -> None:
        self._policy = policy
        self.asked: list[tuple[RequestView, Snapshot, Placement | PlacementError]] = []

    def initial(self) -> Any:
        return self._policy.initial()

    def place(self, state: Any, request: RequestView, snapshot: Snapshot, now: float) -> tuple[Any, Placement]:
        try:
            state, placement = self._policy.place(state, request, snapshot, now)
        except PlacementError as error:
            self.asked.append((request, snapshot, error))
            raise
        self.asked.append((request, snapshot, placement))
        return state, placement


def simulate(policy: PlacementPolicy[Any], name: str = "pdd") -> None:
    """A run with pressure, a dead instance and an outage in it."""
    instances = tuple(spec(instance, cluster, role, depot=instance) for instance, (cluster, role) in INSTANCES.items()
                      if instance not in ONLY or name in ONLY[instance])  # fmt: skip
    scenario = Scenario(
        instances, {("a", "b"): WAN._replace(rate=1e6, outages=((20.0, 30.0),))}, policy,
        handoff_settings("catch_up", 200, 20.0), faults=(Fault("m-1", 5.0, 8.0), Fault("r", 35.0, 3.0)),
    )  # fmt: skip
    workload = AgentSessions(Arrivals(2.0), turns=4, first=640, shared=256, added=100, output_mean=200, think=0.5,
                             longest=3000, block_tokens=PAGE)  # fmt: skip
    Simulation(scenario).run(workload.requests(1), 60)


@pytest.mark.parametrize("name", list(POLICIES))
async def test_the_gateway_places_every_request_of_a_simulation_alike(name: str) -> None:
    settings = POLICIES[name]
    recording = Recording(policy_of(settings))
    simulate(recording, settings.name)
    pipelines = {asked[2].pipeline for asked in recording.asked if isinstance(asked[2], Placement)}
    assert len(recording.asked) > 100
    assert len(pipelines) == PIPELINES[name]
    for request, snapshot, answer in itertools.islice(recording.asked, 0, None, 3):
        gateway = Gateway(settings, snapshot)
        if isinstance(answer, PlacementError):
            with pytest.raises(PlacementError) as raised:
                await gateway.place(request)
            assert str(raised.value) == str(answer)
        else:
            assert await gateway.place(request) == answer
        await gateway.close()


class Gateway:
    """A coordinator whose engines and depots report what a snapshot says."""

    def __init__(self, policy: PolicySettings, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        views = snapshot.instances
        links = [
            {"source": a, "target": b, "rate": f"{round(link.rate * 8)}bit", "rtt": f"{link.rtt}s"}
            for (a, b), link in snapshot.links.items()
        ]
        deployment = msgspec.convert(
            {
                "fleet_key_file": "k", "model": {"name": "m", "path": "."}, "gateway": {"cluster": "a"},
                "tls": {"directory": "."}, "cluster": [{"name": "a"}, {"name": "b"}],
                "policy": msgspec.to_builtins(policy),
                "host": [{"name": v.name, "cluster": v.cluster, "socket": "s", "listen": "127.0.0.1:1"} for v in views],
                "instance": [{"name": v.name, "cluster": v.cluster, "roles": [role.value for role in v.roles],
                              "ranks": [{"host": v.name}], "listen": "127.0.0.1:2"} for v in views],
                "link": links,
            },
            Deployment,
        )  # fmt: skip
        self._depots = {v.name: Depot() for v in views}
        self._coordinator = Coordinator(deployment, {v.name: Engine(v) for v in views}, self._depots)  # type: ignore[arg-type]
        self._coordinator._occupancy.requests.update({v.name: v.assigned for v in views})
        self._coordinator._occupancy.backlog.update({v.name: v.backlog for v in views})

    async def place(self, request: RequestView) -> Placement:
        ids = list(range(request.prompt_tokens))
        names = prompt_pages(ids, PAGE, root(Scope("m", ""), KEY), KEY).names
        for view in self._snapshot.instances:
            held = request.held.get(view.name, 0)
            pages = -(-held // PAGE) if held == request.prompt_tokens else held // PAGE
            self._depots[view.name].tell(Stored(view.name, list(names[:pages])))
            for (source, target), link in self._snapshot.links.items():
                if link.down and view.cluster == source:
                    far = [v.name for v in self._snapshot.instances if v.cluster == target]
                    self._depots[view.name].tell(*(LinkState(to, False, link.down) for to in far))
        for _ in range(3):
            await asyncio.sleep(0)
        run = self._coordinator.generate(GenerationRequest("r", 0.0, ids, Sampling(max_tokens=1)))
        return run.route.placement

    async def close(self) -> None:
        await self._coordinator.aclose()


class Engine:
    def __init__(self, view: Any) -> None:
        self.instance = view.name
        hello = Hello(instance=view.name, epoch="1", model="m", max_model_len=10**6,
                      max_num_seqs=10, contract=CONTRACT)  # fmt: skip
        load = Load(running=view.running, waiting=view.waiting, kv_usage=view.kv_usage)
        self.status = EngineStatus(view.healthy, 0.0, view.detail, hello, load, view.counted)

    async def aclose(self) -> None:
        pass


class Depot:
    fleet_key, trouble = KEY, ""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, *events: Any) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def events(self) -> Any:
        while True:
            yield await self._events.get()

    async def aclose(self) -> None:
        pass

    async def end(self, xfer: str) -> None:
        pass


# ---- handoff ----


def test_the_gateway_hands_over_exactly_when_the_simulator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, RelayedRequest, Decision]] = []

    def decide(settings: Any, state: Any, request: RelayedRequest) -> Any:
        after, decision = handoff_policy.decide(settings, state, request)
        asked.append((state, request, decision))
        return after, decision

    monkeypatch.setattr(relaying, "decide", decide)
    simulate(Recording(policy_of(POLICIES["pdd"])))
    assert {decision.action.value for _, _, decision in asked} >= {"stay", "extend", "switch"}
    assert any(request.quickest_round for _, request, _ in asked), "it must weigh what the gateway weighs"
    for state, request, decision in asked:
        shared = Handoffs(handoff_settings("catch_up", 200, 20.0))
        shared.state = state
        assert _gateway_action(shared, request) is decision.action


def _gateway_action(shared: Handoffs, seen: RelayedRequest) -> Any:
    """What the gateway's handoff does when its relay, main decode and reader are as the simulator saw them."""
    splice = Splice()
    splice.accept(0, [0], Tier.PREFILL, "p-0")
    if seen.relay_tokens:
        splice.accept(1, [0] * seen.relay_tokens, Tier.RELAY, "rld-0")
    pacer = SimpleNamespace(held=seen.held, hold_back=lambda *_: None, release=lambda: None)
    terms = Terms(seen.round_trip, max_tokens=seen.tokens + seen.remaining)
    handoff = Handoff(shared, terms, splice, pacer)  # type: ignore[arg-type]
    status = SimpleNamespace(load=SimpleNamespace(kv_usage=seen.relay_kv_usage))
    now = 1000.0
    handoff.relay_opened(SimpleNamespace(instance=seen.relay, status=status), now - seen.relay_seconds)  # type: ignore[arg-type]
    if seen.token_interval:  # two arrivals, the last one now
        handoff._arrivals.append((now - seen.token_interval * (seen.relay_tokens - 1), 1))
        handoff._arrivals.append((now, seen.relay_tokens))
    else:
        handoff._arrivals.append((now, seen.relay_tokens))
    handoff.extends = [Extend(1, seen.quickest_round, 0)] * seen.rounds
    main = SimpleNamespace(opened=seen.main_ready, instance=seen.main, known=seen.main_known, busy=seen.main_busy)
    return handoff.action(main, now)  # type: ignore[arg-type]
