"""A plan run in the simulator at the rate that it is meant for, beside what the equations say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from pdrelay.perf.lengths import Lengths
from pdrelay.plan.evaluate import Evaluator, Worth
from pdrelay.plan.latency import Latency
from pdrelay.plan.problem import Problem
from pdrelay.plan.scenario import Sustained, scenario_of, sustained
from pdrelay.sim.metrics import Metrics
from pdrelay.sim.simulation import Simulation
from pdrelay.workload.base import Request

REQUESTS = 1500
AGREED = 0.05
USED = 0.8
SEEDS = 3
LATENCY_AGREED = 0.25


LATER = (
    "the equations share a pool's queue (M/G/c, with a correction for placement at arrival); the policy places by the "
    "number of requests at an instance, whatever their length"
)
SOONER = "the equations take waits as exponential, whose tail is longer than that of a queue in a run of this length"


class Beside(NamedTuple):
    """One figure by the equations and by the simulator."""

    figure: str
    planned: float
    simulated: float

    @property
    def difference(self) -> float:
        """Relative to the plan."""
        return self.simulated / self.planned - 1 if self.planned else 0.0


class Verified(NamedTuple):
    """All figures, and why some differ."""

    figures: list[Beside]
    reasons: list[str]


def verify(problem: Problem, worth: Worth, seed: int = 0, requests: int = REQUESTS) -> Verified:
    """The highest rate, then TTFT, TTST and TPOT at the rate that the plan serves."""
    most = sustained(problem, worth.plan, worth.rates.total, seed)
    latency = Latency(Evaluator(problem).loads(worth.plan), worth.plan)
    # Close to the rate that is full a queue takes longer to reach its mean than any run lasts.
    rate = min(worth.serves, USED * worth.rates.total)
    times = latency.times(rate)
    runs = [_served(problem, worth, rate, seed + number, requests) for number in range(SEEDS)]

    def mean(name: str) -> float:
        return fmean(run.digests[name].mean for run in runs)

    def slowest_tenth(name: str) -> float:
        return fmean(run.digests[name].percentile(90) for run in runs)

    figures = [
        Beside("highest rate, requests/s", worth.rates.total, most.rate),
        Beside(f"mean TTFT at {rate:.3g}/s, s", times.ttft_mean, mean("ttft")),
        Beside("P90 TTFT, s", times.ttft[1], slowest_tenth("ttft")),
        Beside("mean TTST, s", times.ttst_mean, mean("ttst")),
        Beside("P90 TTST, s", times.ttst[1], slowest_tenth("ttst")),
        Beside("time per token, s", times.tpot, mean("tpot")),
    ]
    return Verified(figures, explain(worth, figures, most, runs))


def explain(worth: Worth, figures: list[Beside], most: Sustained, runs: Sequence[Metrics]) -> list[str]:
    """A sentence for each figure that is further off than expected."""
    reasons = []
    if abs(figures[0].difference) > AGREED:
        reasons.append(f"highest rate {figures[0].difference:+.1%}: {why_rate(worth, most)}")
    for late, why in ((1, LATER), (-1, SOONER)):
        off = [f for f in figures[1:5] if late * f.difference > LATENCY_AGREED]
        if off:
            reasons.append(", ".join(f"{f.figure} {f.difference:+.0%}" for f in off) + f": {why}")
    if preempted := sum(run.preemptions for run in runs):
        reasons.append(f"{preempted:,} preemptions: decode memory was full; their tokens are computed twice")
    if lost := sum(run.counts["failed"] + run.counts["refused"] for run in runs):
        reasons.append(f"{lost:,} requests were refused: they fit into no instance's KV memory")
    return reasons


def why_rate(worth: Worth, most: Sustained) -> str:
    """What the simulator found busy while it sustained another rate than the equations expect."""
    busy = sorted([*most.busy.items(), *most.lines.items()], key=lambda item: item[1], reverse=True)
    found = ", ".join(f"{name} {share:.0%}" for name, share in busy[:3])
    text = f"{worth.rates.binding} was expected to be full first; in the simulator {found} were busy"
    if most.metrics.preemptions:
        text += f", with {most.metrics.preemptions:,} preemptions"
    if most.metrics.made["relay"] and most.rate > worth.rates.total:
        text += "; what ends on a relay waits neither for main decode nor for the line, whose backlog then grows"
    return text


def _served(problem: Problem, worth: Worth, rate: float, seed: int, count: int) -> Metrics:
    """An open system: Poisson arrivals at `rate`."""
    simulation = Simulation(scenario_of(problem, worth.plan))
    return simulation.run(_arriving(problem.lengths, rate, seed, count), count).metrics


def _arriving(lengths: Lengths, rate: float, seed: int, count: int) -> Iterator[Request]:
    moments = np.cumsum(np.random.default_rng(seed + 1).exponential(1 / rate, count))
    drawn = itertools.islice(lengths.random_draws(seed), count)
    for moment, (prompt, cached, output) in zip(moments.tolist(), drawn, strict=True):
        yield Request(moment, prompt, output, cached=cached)
