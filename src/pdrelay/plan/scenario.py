"""A plan as a scenario of the simulator, and the rate that the simulator sustains with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pdrelay.cluster.topology import Role
from pdrelay.perf.lengths import Lengths
from pdrelay.plan.loads import Loads
from pdrelay.plan.problem import Plan, Problem, Wire
from pdrelay.plan.rates import decode_batch
from pdrelay.policy.handoff import RelayBound, Settings
from pdrelay.policy.prfaas import Prfaas
from pdrelay.sim.line import LineSpec
from pdrelay.sim.metrics import Metrics
from pdrelay.sim.record import Record
from pdrelay.sim.scenario import InstanceSpec, Scenario
from pdrelay.sim.simulation import Outcome, Simulation
from pdrelay.workload.base import Request

TURNS = 10
"""Requests that each user of a closed system sends, one after the other."""

COUNTED = (0.35, 0.75)
"""Completions between these shares of all are counted: neither the start nor the end."""


def scenario_of(problem: Problem, plan: Plan) -> Scenario:
    """The deployment; each decode instance runs the batch that the plan allows."""
    loads = Loads(problem, plan.main, np.array([plan.threshold]))
    instances = []
    for pool in problem.pools:
        for role in Role:
            profile = pool.profile
            if role is Role.DECODE and plan.of(pool.name, role):
                profile = replace(profile, max_num_seqs=max(1, decode_batch(loads, pool.name)))
            instances += [
                InstanceSpec(f"{pool.name}-{role.value}-{number}", pool.cluster, frozenset({role}), profile)
                for number in range(plan.of(pool.name, role))
            ]
    used = {instance.cluster for instance in instances}
    return Scenario(
        instances=tuple(instances),
        lines={ends: _line(wire) for ends, wire in problem.wires.items() if used.issuperset(ends)},
        policy=Prfaas(plan.threshold, hit_threshold=plan.hit_threshold),
        handoff=Settings("dynamic", RelayBound(1024, 120.0)),
        cached=problem.cache,
    )


def _line(wire: Wire) -> LineSpec:
    return LineSpec(wire.rate, wire.rtt, wire.connections, wire.connection_rate, wire_ratio=wire.wire_ratio)


class Sustained(NamedTuple):
    """What a closed system did: as many users as keep the slowest stage busy, each sending without a pause."""

    rate: float  # requests/s
    metrics: Metrics
    busy: dict[str, float]  # share of the time that instances of a pool and role computed
    lines: dict[str, float]  # share of each line that was used


def sustained(problem: Problem, plan: Plan, expected: float, seed: int = 0, turns: int = TURNS) -> Sustained:
    """The highest rate at which every kind of request is served: that of a closed system with enough users.

    In an open system above its rate the kinds that are not at the bottleneck would still be served in full.
    `expected` requests/s only decide how many users are enough.
    """
    records: list[float] = []

    def note(record: Record) -> None:
        if record.status == "ok":
            records.append(record.finished)

    users = _users(problem, plan, expected)
    simulation = Simulation(scenario_of(problem, plan), note)
    outcome = simulation.run(_closed(problem.lengths, users, turns, seed), users)
    ends = np.sort(records)
    first, last = (min(int(share * len(ends)), len(ends) - 1) for share in COUNTED)
    took = float(ends[last] - ends[first])
    return Sustained((last - first) / took if took else 0.0, outcome.metrics, _busy(outcome), _used(outcome))


def _users(problem: Problem, plan: Plan, expected: float) -> int:
    """Twice what is under way at the expected rate, and some to wait before every instance."""
    loads = Loads(problem, plan.main, np.array([plan.threshold]))
    slots = sum(n * decode_batch(loads, pool) for (pool, role), n in plan.counts.items() if role is Role.DECODE)
    instances = sum(plan.counts.values())
    longest = max(float(load.seconds[0]) for load in loads.prefill.values())
    return int(1.3 * slots + 8 * instances + 2 * expected * longest) + 16


def _closed(lengths: Lengths, users: int, turns: int, seed: int) -> Iterator[Request]:
    """Each user's requests, the next one as soon as one has ended; together they follow the lengths in time."""
    drawn = list(itertools.islice(lengths.draws(seed), users * turns))
    for user in range(users):
        head: Request | None = None
        for turn in reversed(range(turns)):
            prompt, cached, output = drawn[turn * users + user]
            head = Request(0.0, prompt, output, cached=cached, session=f"u{user}", then=head)
        assert head is not None
        yield head


def _busy(outcome: Outcome) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for name, each in outcome.engines.items():
        shares.setdefault(name.rpartition("-")[0], []).append(each["busy"])
    return {name: sum(each) / len(each) for name, each in shares.items()}


def _used(outcome: Outcome) -> dict[str, float]:
    return {name: line["utilisation"] for name, line in outcome.lines.items()}
