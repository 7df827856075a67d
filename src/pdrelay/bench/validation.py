"""How far the simulator is off: the same requests played on a deployment and simulated, compared one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from pdrelay.bench.load_metrics import Timing
from pdrelay.sim.deployed import Terms
from pdrelay.sim.record import Record
from pdrelay.sim.scenario import Scenario
from pdrelay.sim.simulation import Simulation
from pdrelay.workload.base import Request

METRICS = ("ttft", "ttst", "tpot", "e2el")
LEAST_LIMIT = 0.10
ROOM = 1.5
"""Times the difference between two real runs that the simulator may be off."""

CORES = (0.0, *(n / 4 for n in range(2, 17)))
"""Cores that calibration tries first; 0: each engine has cores of its own."""
FINER = 0.125

Times = dict[tuple[str, int], dict[str, float]]
"""Seconds by metric, of a turn of a session."""
Build = Callable[[Terms], Scenario]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One time, over all requests of the validation. Seconds, and medians of relative differences."""

    name: str
    real: float  # median of both runs
    simulated: float
    error: float  # of the simulation from either real run
    difference: float  # of the second real run from the first
    limit: float
    holds: bool


def prepared(requests: Iterable[Request], page_tokens: int) -> list[Request]:
    """The same requests, each in a session by which it is found again, hits in whole pages, as engines keep them."""
    found = []
    for number, request in enumerate(requests):
        turns = [
            turn._replace(
                session=turn.session or f"request-{number}", cached=_whole(turn.cached, page_tokens), then=None
            )
            for turn in request.turns()
        ]
        head = turns[-1]
        for turn in reversed(turns[:-1]):
            head = turn._replace(then=head)
        found.append(head)
    return found


def _whole(cached: int, page_tokens: int) -> int:
    return cached - cached % page_tokens if cached >= 0 else cached


def measured(timings: Iterable[Timing]) -> Times:
    """Times of the requests that were answered."""
    return {(t.session, t.turn): {name: getattr(t, name) for name in METRICS} for t in timings if not t.error}


def simulate(scenario: Scenario, requests: Sequence[Request]) -> Times:
    """The same of a simulation."""
    found: dict[str, list[Record]] = defaultdict(list)
    Simulation(scenario, lambda record: found[record.session].append(record)).run(iter(requests), len(requests))
    return {
        (session, turn): {name: getattr(record, name) for name in METRICS}
        for session, records in found.items()
        for turn, record in enumerate(sorted(records, key=lambda record: record.arrival))
        if record.status == "ok"
    }


def calibrate(build: Build, requests: Sequence[Request], real: Times, *, sleeping: bool) -> Terms:
    """The one term that no profile of a single engine tells, from a real run.

    Engines that compute share cores: as many as make the sum of the median errors least. Engines that only sleep as
    long as a profile says (`sleeping`) need none; what their requests wait for is processes that wake up late, and is
    taken as the front's: what the median request's TTFT lacks.
    """
    if sleeping:
        simulated = simulate(build(Terms()), requests)
        missing = [real[key]["ttft"] - simulated[key]["ttft"] for key in real.keys() & simulated.keys()]
        return Terms(front=max(0.0, float(np.median(missing))))
    tried = {cores: _error(build, requests, real, cores) for cores in CORES}
    around = min(tried, key=tried.__getitem__)
    if around:
        finer = (around - FINER, around + FINER)
        tried |= {cores: _error(build, requests, real, cores) for cores in finer}
    return Terms(cores=min(tried, key=tried.__getitem__))


def _error(build: Build, requests: Sequence[Request], real: Times, cores: float) -> float:
    return sum(errors(simulate(build(Terms(cores)), requests), real).values())


def errors(simulated: Times, real: Times) -> dict[str, float]:
    """Median relative error of each metric over the requests that both have."""
    return {name: float(np.median(_relative(simulated, real, name))) for name in METRICS}


def compare(first: Times, second: Times, simulated: Times) -> list[Metric]:
    """Each metric of the simulation beside two real runs of the same requests."""
    found = []
    for name in METRICS:
        error = float(np.median([*_relative(simulated, first, name), *_relative(simulated, second, name)]))
        difference = float(np.median(_relative(second, first, name)))
        limit = max(LEAST_LIMIT, ROOM * difference)
        found.append(
            Metric(
                name=name, real=_median([first, second], name), simulated=_median([simulated], name), error=error,
                difference=difference, limit=limit, holds=error <= limit,
            )
        )  # fmt: skip
    return found


def _relative(left: Times, right: Times, name: str) -> list[float]:
    pairs = [(left[key][name], right[key][name]) for key in left.keys() & right.keys()]
    return [abs(a / b - 1) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and b > 0]


def _median(runs: Sequence[Mapping[tuple[str, int], Mapping[str, float]]], name: str) -> float:
    return float(np.nanmedian([times[name] for run in runs for times in run.values()]))
