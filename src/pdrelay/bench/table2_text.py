"""Table 2 as text, and why our rows are not the published ones, as far as the run itself can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from pdrelay.bench.settings import Carrier
from pdrelay.bench.stats import Estimate
from pdrelay.bench.table2 import (
    ARRIVALS,
    CONNECTION_RATE,
    DISTRIBUTIONS,
    MOST_CORE_WAIT,
    POOL,
    PUBLISHED,
    Arm,
    Load,
    Table2,
)
from pdrelay.workload.hit_rates import Name

_LEGEND = (
    "Intervals are 95 % bootstrap. * without queueing for a connection, as published; rows of the link include all "
    "waiting,\nand their queueing is the time until the first page is there."
)


def explain(arms: Sequence[Arm], load: Load, rate: float, scale: float) -> list[str]:
    """Paragraphs, each on one difference. Latencies need no scaling: sizes and rates are divided alike. `rate` is what
    the line leaves for payload, in bytes per second."""
    facts = _Facts({(arm.carrier, arm.distribution): arm for arm in arms}, load, rate, scale)
    paragraphs = (facts.limited(), facts.pool_use(), facts.narrow_tail(), facts.fair(), facts.srpt())
    return [text for text in paragraphs if text]


class _Facts:
    """What the paragraphs are computed from. A paragraph whose rows did not run is empty."""

    def __init__(self, arms: dict[tuple[Carrier, Name], Arm], load: Load, rate: float, scale: float) -> None:
        self._arms, self._rate, self._scale = arms, rate, scale
        self._limit = CONNECTION_RATE / scale
        self._sizes = {name: np.asarray(load.sizes(name), dtype=np.float64) for name in DISTRIBUTIONS}

    def limited(self) -> str:
        """The published skewed row."""
        arm = self._arms.get(("pool", "skewed"))
        if arm is None:
            return ""
        p50, p99 = (float(np.percentile(self._sizes["skewed"], q)) for q in (50, 99))
        row = PUBLISHED["skewed"]
        return (
            f"Skewed, a connection for each transfer: {_seconds(arm.p50_moving.value)} and "
            f"{_seconds(arm.p99_moving.value)}, published {_seconds(row.p50)} and {_seconds(row.p99)}. This is size "
            f"over the connection's own limit: the median delta ({_bytes(p50 * self._scale)} at full scale) takes "
            f"{_seconds(p50 / self._limit)} at 0.107 Gbit/s, the 99th percentile ({_bytes(p99 * self._scale)}) "
            f"{_seconds(p99 / self._limit)}, however full the line is. The limit was derived from these two figures: "
            "that both fit says that they are consistent, not more."
        )

    def pool_use(self) -> str:
        """The published pool figures."""
        skewed, narrow = self._arms.get(("pool", "skewed")), self._arms.get(("pool", "narrow"))
        if skewed is None or narrow is None:
            return ""
        bytes_per_second = ARRIVALS * float(self._sizes["narrow"].mean())
        busy, full = bytes_per_second / self._limit, bytes_per_second * self._scale / POOL * 8 / 1e9
        return (
            f"Pool use: {skewed.connections_used:.0%} skewed and {narrow.connections_used:.0%} narrow, published 63% "
            f"and 100%. Arrivals times mean size over the limit are {busy:.0f} busy connections, {busy / POOL:.0%} of "
            f"{POOL}, for both rows, because both have the same mean size: Little's law knows no distribution. (The "
            "skewed pool is still filling when a short run ends.) At one limit for both rows a narrow load cannot fill "
            f"a pool that a skewed one leaves a third empty; connections at {full:.2f} Gbit/s or less would fill it in "
            "both. The published narrow row had slower connections than the skewed one, or a smaller pool."
        )

    def narrow_tail(self) -> str:
        """The published narrow latencies."""
        pool, fair = self._arms.get(("pool", "narrow")), self._arms.get(("link-fair", "narrow"))
        if pool is None or fair is None:
            return ""
        row, largest = PUBLISHED["narrow"], float(self._sizes["narrow"].max())
        implied = [size * self._scale * 8 / 1e9 for size in (float(np.median(self._sizes["narrow"])), largest)]
        return (
            f"Narrow: {_seconds(pool.p50_moving.value)} and {_seconds(pool.p99_moving.value)} at 0.107 Gbit/s, "
            f"published {_seconds(row.p50)} and {_seconds(row.p99)}. The published median needs "
            f"{implied[0] / row.p50:.2f} Gbit/s a connection, its tail {implied[1] / row.p99:.3f}: no narrow delta is "
            f"larger than {_bytes(largest * self._scale)}, which takes {_seconds(largest / self._limit)} at the limit, "
            f"and on a line that is shared fairly without one P99 is {_seconds(fair.p99.value)} here. Something that "
            "this experiment does not have must hold up one transfer in a hundred: losses with retransmission timeouts "
            "on a full line, or several transfers on one connection. We do not imitate it."
        )

    def fair(self) -> str:
        """Our link beside ideal sharing."""
        skewed, narrow = self._arms.get(("link-fair", "skewed")), self._arms.get(("link-fair", "narrow"))
        if skewed is None or narrow is None:
            return ""
        return (
            f"Our link, fair: every transfer uses all {skewed.connections} connections, so that a connection's limit "
            "does not show and latency is size times how many share the line. Ideal sharing at this load, "
            f"{self._load('skewed'):.2f} of what headers leave of the line, takes "
            f"{_seconds(self._shared('skewed'))} on average for the median delta of the skewed row and "
            f"{_seconds(self._shared('narrow'))} for that of the narrow one; measured P50 {_seconds(skewed.p50.value)} "
            f"and {_seconds(narrow.p50.value)}. {self._idle(skewed)}"
        )

    def srpt(self) -> str:
        """What small-first buys, and costs."""
        srpt, fair = self._arms.get(("link-srpt", "skewed")), self._arms.get(("link-fair", "skewed"))
        if srpt is None or fair is None:
            return ""
        sizes = self._sizes["skewed"]
        small = float(sizes[sizes <= np.median(sizes)].sum() / sizes.sum())
        return (
            f"Our link, srpt: small deltas pass large ones, P50 {_seconds(srpt.p50.value)} beside "
            f"{_seconds(fair.p50.value)} of fair on the same arrivals. The smaller half of all deltas are "
            f"{small:.0%} of the bytes, so the large ones have little to lose by it: P99 "
            f"{_seconds(srpt.p99.value)} beside {_seconds(fair.p99.value)}."
        )

    def _idle(self, arm: Arm) -> str:
        if arm.idle_p50 is None:
            return ""
        size = float(np.median(self._sizes[arm.distribution]))
        return (
            f"On an idle line the median delta takes {_seconds(arm.idle_p50)}, of which {_seconds(size / self._rate)} "
            "are the line's; the rest are messages and copies, which do not shrink with the scale."
        )

    def _load(self, name: Name) -> float:
        return ARRIVALS * float(self._sizes[name].mean()) / self._rate

    def _shared(self, name: Name) -> float:
        """Mean sojourn of a median delta when all share the line evenly: size over what the load leaves of the rate."""
        sizes = self._sizes[name]
        left = max(self._rate - ARRIVALS * float(sizes.mean()), self._rate / 100)
        return float(np.median(sizes)) / left


def show(result: Table2, console: Console) -> None:
    """Prints rows, checks and paragraphs."""
    where = "two network namespaces (tbf)" if result.line == "namespaces" else "user space"
    console.print(
        f"\nPDD Table 2 at 1/{result.scale:g}: a line of {result.rate * 8 / 1e6:g} Mbit/s (published 20 Gbit/s), whole "
        f"prompts of {_bytes(result.prompt_bytes)} (281 MB), {ARRIVALS:g} arrivals a second as published, in {where}, "
        f"round trip {result.rtt * 1e3:g} ms; load {result.offered_load['skewed']:.2f} of the line in payload; "
        f"{result.duration:g} s of arrivals a row, seed {result.seed}"
        + (f"; all passed {result.slower:g} times as slowly, times are divided by that" if result.slower > 1 else "")
    )
    if result.note:
        console.print(result.note, markup=False)
    console.print(_table(result))
    console.print(_LEGEND)
    for arm in result.arms:
        if arm.core_wait is not None and arm.core_wait > MOST_CORE_WAIT:
            console.print(_starved(arm, arm.core_wait), markup=False)
    for check in result.checks:
        verdict = "holds" if check.holds else "does NOT hold"
        console.print(f"{check.what}: {check.ratio.text(2)}, at most {check.at_most:g}: {verdict}", markup=False)
    for paragraph in result.explanation:
        console.print(f"\n{paragraph}", markup=False)


def _starved(arm: Arm, core_wait: float) -> str:
    return (
        f"{arm.carrier}, {arm.distribution}: NOT a measurement of the line: in each second the depots waited "
        f"{core_wait:.2f} s for a core; run it again on an idle machine, or more slowly"
    )


def _table(result: Table2) -> Table:
    columns = ("deltas", "carried by", "P50", "P99", "queueing, mean", "connections used", "line used")
    table = Table(*columns, box=None, pad_edge=False)
    for name in DISTRIBUTIONS:
        row = PUBLISHED[name]
        queueing = _seconds(row.queueing) if row.queueing is not None else "not told"
        table.add_row(name, "published *", _seconds(row.p50), _seconds(row.p99), queueing, f"{row.pool_use:.0%}", "")
        for arm in result.arms:
            if arm.distribution == name:
                table.add_row(name, *_cells(arm))
    return table


def _cells(arm: Arm) -> Iterator[str]:
    pool = arm.carrier == "pool"
    p50, p99 = (arm.p50_moving, arm.p99_moving) if pool else (arm.p50, arm.p99)
    yield f"pool, {CONNECTION_RATE * 8 / 1e9:g} Gbit/s each *" if pool else arm.carrier
    yield _estimate(p50)
    yield _estimate(p99)
    yield _seconds(arm.queueing)
    yield f"{arm.connections_used:.0%} of {arm.connections}"
    yield f"{arm.line_use:.0%}"


def _estimate(estimate: Estimate) -> str:
    return f"{_seconds(estimate.value)} ({_seconds(estimate.low)} to {_seconds(estimate.high)})"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.3g} MB"
