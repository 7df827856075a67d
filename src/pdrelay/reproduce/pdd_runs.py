"""The simulations behind PDD's tables, run in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from pdrelay.policy.handoff import Mode
from pdrelay.reproduce.pdd_setup import ARRIVALS, KV_PER_TOKEN, PROMPT, REQUESTS, Deployment, scenario, wan
from pdrelay.sim.events import Events
from pdrelay.sim.line import Line, Transfer
from pdrelay.sim.simulation import Simulation
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.base import Request
from pdrelay.workload.generators import PDD_EVEN, PDD_HITS, AgenticRequests
from pdrelay.workload.hits import SkewedHits

OnDone = Callable[[], None]


class Serving(NamedTuple):
    """One run of a deployment. `even`: Figure 8's requests, all with a hit rate of 90 % and 1,000 tokens of output."""

    kind: Deployment
    seed: int
    rate: float
    mode: Mode = "one_shot"
    even: bool = False


class Served(NamedTuple):
    """What it measured; seconds."""

    ttft: tuple[float, float, float]  # P50, P90, P99
    tpot_p90: float
    relay_tokens: int
    main_tokens: int
    relay_per_request: float
    pause: float  # longest gap of the median request
    ttft_curve: list[tuple[float, float]]
    transfer_curve: list[tuple[float, float]]


def serve(run: Serving) -> Served:
    """Simulates one run."""
    hits = SkewedHits(1.0, 1.0, 0.8999, 0.9001) if run.even else PDD_HITS
    requests: Iterable[Request] = AgenticRequests(Arrivals(run.rate), hits, PROMPT).requests(run.seed)
    if run.even:
        requests = (request._replace(output=1000) for request in requests)
    metrics = Simulation(scenario(run.kind, run.mode)).run(iter(requests), REQUESTS).metrics
    p50, p90, p99 = metrics.digests["ttft"].percentiles([50, 90, 99])
    return Served(
        (p50, p90, p99),
        metrics.digests["tpot"].percentile(90),
        metrics.made["relay"],
        metrics.made["main"],
        metrics.relay_per_request.mean,
        metrics.digests["largest_gap"].percentile(50),
        metrics.digests["ttft"].curve(),
        metrics.digests["transfer"].curve(),
    )


class Moved(NamedTuple):
    """Table 2: transfers over the full line; seconds, without waiting for a connection."""

    p50: float
    p99: float
    pool_use: float
    queueing: float


def move(even: bool, seed: int = 0, seconds: float = 300.0, rate: float = 80.0) -> Moved:
    """80 transfers a second for `seconds`."""
    random = np.random.default_rng(seed)
    count = int(seconds * rate)
    moments = np.cumsum(random.exponential(1 / rate, count))
    sizes = PROMPT * (1 - (PDD_EVEN if even else PDD_HITS).sample(random, count)) * KV_PER_TOKEN
    events = Events()
    line = Line(events, wan(), seed)
    done: list[Transfer] = []

    def send(size: float) -> None:
        transfer = line.open(done.append)
        line.give(transfer, size)
        line.close(transfer)

    def at(moment: float, size: float) -> None:
        events.at(moment, lambda: send(size))

    for moment, size in zip(moments.tolist(), sizes.tolist(), strict=True):
        at(moment, size)
    events.run(until=float(moments[-1]))
    line.settle()
    use = line.connection_seconds / events.now / line.spec.connections
    events.run()
    latencies = [transfer.arrived - transfer.started for transfer in done]
    queueing = float(np.mean([transfer.queued for transfer in done]))
    return Moved(float(np.percentile(latencies, 50)), float(np.percentile(latencies, 99)), use, queueing)


def serve_all(runs: Sequence[Serving], processes: int, on_done: OnDone) -> dict[Serving, Served]:
    """All runs; calls `on_done` after each."""
    found: dict[Serving, Served] = {}
    with ProcessPoolExecutor(max_workers=processes) as pool:
        for run, served in zip(runs, pool.map(serve, runs), strict=True):
            found[run] = served
            on_done()
    return found


def at_published_rate(kind: Deployment, seed: int, mode: Mode = "one_shot", *, even: bool = False) -> Serving:
    """A run at the rate of Table 8."""
    return Serving(kind, seed, ARRIVALS[kind], mode, even)
