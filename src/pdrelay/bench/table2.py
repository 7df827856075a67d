"""PDD's Table 2: transfers of skewed and of evenly sized deltas over a full line. Set-up, results, what must hold.

The published set-up (technical report, section 2.2): a line of 20 Gbit/s, Poisson arrivals at 80 a second, prompts of
64K tokens, mean hit rate 0.90. What it does not print is derived from what it does: without a cache at the far side it
would need more than 180 Gbit/s, so a whole prompt has 281 MB; the latencies imply that a connection carries about 0.107
Gbit/s and that the pool has about 256 of them. Rates and sizes are divided by `scale`; arrivals and times are not.
Where cores are few the whole experiment passes `slower` times as slowly, and its times are divided by that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pdrelay.bench.settings import CARRIERS, Carrier, Kind
from pdrelay.bench.stats import Estimate, Floats, estimate, percentile, percentile_ratio
from pdrelay.kv.contract import KVContract, KVGroup
from pdrelay.workload.hit_rates import Name, hit_rates, poisson_arrivals

LINE_RATE = 20e9 / 8
ARRIVALS = 80.0
PROMPT_BYTES = 180e9 / 8 / ARRIVALS
CONNECTION_RATE = 0.107e9 / 8
POOL = 256

PROMPT_PAGES = 256
"""Pages of a whole prompt: a delta is a whole number of these."""
WARM_UP = 0.1
"""Share of the transfers, the first ones, that find a line emptier than it will be and do not count."""
NEIGHBOURS = 40
"""Transfers that are resampled together: those that share the line with each other fare alike."""

PAYLOAD_SHARE: dict[Kind, float] = {"namespaces": 1448 / 1514, "user": 1.0}
"""Of the line's rate: Ethernet, IP and TCP headers count between namespaces."""

DISTRIBUTIONS: tuple[Name, ...] = ("skewed", "narrow")


MOST_CORE_WAIT = 0.3
"""Above this a row measures the machine, not the line. (That threads often wait says little: a packet wakes several,
for microseconds.)"""


class Published(NamedTuple):
    """One row of the published table; seconds. Latencies exclude queueing for a connection."""

    p50: float
    p99: float
    pool_use: float
    queueing: float | None


PUBLISHED: dict[Name, Published] = {
    "skewed": Published(0.248, 18.883, 0.63, None),
    "narrow": Published(1.210, 25.542, 1.00, 1.682),
}


class Load(NamedTuple):
    """What every carrier is given: moments of arrival in seconds, and pages of each transfer by distribution."""

    arrivals: list[float]
    pages: dict[Name, list[int]]
    page_bytes: int

    @property
    def counting(self) -> slice:
        """The transfers that count."""
        return slice(int(len(self.arrivals) * WARM_UP), None)

    @property
    def contract(self) -> KVContract:
        """What the engines at both depots keep: pages of one part."""
        group = KVGroup(
            layers=1, heads=1, head_size=0, dtype="uint8", part_bytes=self.page_bytes, codec="bench", kind="mla"
        )
        return KVContract(model="bench", revision="", page_tokens=256, block_tokens=256, groups=(group,))

    def sizes(self, name: Name) -> list[int]:
        """Bytes of each transfer."""
        return [pages * self.page_bytes for pages in self.pages[name]]


def load_of(scale: float, duration: float, seed: int) -> Load:
    """The load of `duration` seconds. The same seed gives the same load."""
    random = np.random.default_rng(seed)
    arrivals = poisson_arrivals(ARRIVALS, duration, random)
    pages = {name: _pages(hit_rates(name, len(arrivals), random)) for name in DISTRIBUTIONS}
    return Load(arrivals.tolist(), pages, round(PROMPT_BYTES / PROMPT_PAGES / scale))


def _pages(hits: Floats) -> list[int]:
    pages: list[int] = np.maximum(1, np.rint((1 - hits) * PROMPT_PAGES)).astype(int).tolist()
    return pages


class Moments(msgspec.Struct, frozen=True):
    """When each transfer was to begin, began, and was complete at the far side (CLOCK_MONOTONIC, seconds)."""

    arrived: list[float]
    began: list[float]
    ended: list[float]

    def faster(self, times: float) -> Moments:
        """As if all had passed so many times as fast."""
        return Moments(*([moment / times for moment in row] for row in (self.arrived, self.began, self.ended)))

    def under_way(self, start: float, end: float) -> float:
        """How many had begun and not ended, on average from `start` to `end`."""
        began, ended = np.clip(self.began, start, end), np.clip(self.ended, start, end)
        return float((ended - began).sum() / (end - start))


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One carrier with one distribution. Seconds and bytes; only the transfers that count."""

    carrier: Carrier
    distribution: Name
    transfers: int
    bytes: int
    p50: Estimate  # with queueing
    p99: Estimate
    p50_moving: Estimate  # without: from the first page's arrival (link), from getting a connection (pool)
    p99_moving: Estimate
    queueing: float  # mean
    connections: int
    connections_used: float  # mean share of them that carried something, in the second half of the arrivals
    core_wait: float | None  # link: seconds in each second that the depots' threads waited for a core, together
    idle_p50: float | None  # link: of a median delta on a line with nothing else on it
    line_use: float  # payload over what the line could have carried until the last transfer ended
    latencies: list[float]  # with queueing, in order of arrival


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio that must hold."""

    what: str
    ratio: Estimate
    at_most: float
    holds: bool


class Table2(msgspec.Struct, frozen=True, kw_only=True):
    """The whole experiment."""

    scale: float
    slower: float
    line: Kind
    note: str
    rate: float  # of the scaled line, bytes per second; the real one's is `slower` times less
    rtt: float
    duration: float
    seed: int
    prompt_bytes: int
    mean_bytes: dict[str, float]  # payload of a transfer, by distribution
    offered_load: dict[str, float]  # payload over the line's rate, as in the published 18 of 20 Gbit/s
    arms: list[Arm]
    checks: list[Check]
    explanation: list[str]
    failures: dict[str, str]


def arm_of(
    carrier: Carrier, distribution: Name, load: Load, moments: Moments, rate: float, connections: int, used: float,
    idle_p50: float | None = None, core_wait: float | None = None,
) -> Arm:  # fmt: skip
    """What the moments say."""
    arrived, began, ended = (np.asarray(row) for row in (moments.arrived, moments.began, moments.ended))
    counting, sizes = load.counting, load.sizes(distribution)
    latencies, moving = (ended - arrived)[counting].tolist(), (ended - began)[counting].tolist()

    def of(q: float, values: list[float]) -> Estimate:
        return estimate(percentile(q), values, block=NEIGHBOURS)

    return Arm(
        carrier=carrier, distribution=distribution, transfers=len(latencies), bytes=sum(sizes[counting]),
        p50=of(50, latencies), p99=of(99, latencies), p50_moving=of(50, moving), p99_moving=of(99, moving),
        queueing=float((began - arrived)[counting].mean()), connections=connections, connections_used=used,
        idle_p50=idle_p50, core_wait=core_wait,
        line_use=sum(sizes) / float(ended.max() - arrived[0]) / rate, latencies=latencies,
    )  # fmt: skip


def checks_of(arms: Sequence[Arm]) -> Iterator[Check]:
    """The ratios that must hold, of those arms that ran."""
    found = {(arm.carrier, arm.distribution): arm for arm in arms}
    for carrier in CARRIERS:
        skewed, narrow = found.get((carrier, "skewed")), found.get((carrier, "narrow"))
        if skewed is not None and narrow is not None:
            yield _check(f"P50, {carrier}: skewed beside narrow", skewed, narrow, 50, 0.4)
    srpt, fair = found.get(("link-srpt", "skewed")), found.get(("link-fair", "skewed"))
    if srpt is not None and fair is not None:
        yield _check("P50, skewed: srpt beside fair", srpt, fair, 50, 0.3)
        yield _check("P99, skewed: srpt beside fair", srpt, fair, 99, 1.1)


def _check(what: str, left: Arm, right: Arm, q: float, at_most: float) -> Check:
    ratio = estimate(percentile_ratio(q), left.latencies, right.latencies, block=NEIGHBOURS)
    return Check(what=what, ratio=ratio, at_most=at_most, holds=ratio.value <= at_most)
