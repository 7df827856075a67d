"""Links as Prometheus metrics: what each can carry, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pdrelay.depot.base import LinkEstimate


class LinkMetric(NamedTuple):
    """One figure of an estimate as a metric."""

    name: str
    kind: str
    text: str
    value: Callable[[LinkEstimate], float]


LINK_METRICS = (
    LinkMetric("rate_bytes_per_second", "gauge", "What the line carries; configured until measured.", lambda e: e.rate),
    LinkMetric("rate_measured", "gauge", "Whether the rate was measured.", lambda e: int(e.measured)),
    LinkMetric("rtt_seconds", "gauge", "Round trip of a small message, smoothed.", lambda e: e.rtt),
    LinkMetric("base_rtt_seconds", "gauge", "Round trip without queueing.", lambda e: e.base_rtt),
    LinkMetric("tcp_rtt_seconds", "gauge", "The kernel's round trip over the bulk connections.", lambda e: e.tcp_rtt),
    LinkMetric("loss_ratio", "gauge", "Share of the bytes sent of late that were sent again.", lambda e: e.loss),
    LinkMetric("retransmitted_bytes_total", "counter", "Bytes sent again.", lambda e: e.retransmitted_bytes),
    LinkMetric("connections", "gauge", "Connections for payload.", lambda e: e.lanes),
    LinkMetric("far_room_bytes", "gauge", "Bytes that new pages may take in the far arena.", lambda e: e.far_room),
    LinkMetric("far_waiting", "gauge", "Transfers that wait for room there.", lambda e: e.far_waiting),
    LinkMetric("connections_busy_ratio", "gauge", "Share of them in use, over a second.", lambda e: e.busy),
)


def link_lines(estimates: Mapping[str, LinkEstimate], label: str) -> Iterator[str]:
    """Prometheus text for the links in `estimates`, by the depot that each leads to."""
    for metric in LINK_METRICS:
        yield f"# HELP pdrelay_depot_link_{metric.name} {metric.text}"
        yield f"# TYPE pdrelay_depot_link_{metric.name} {metric.kind}"
        for to, estimate in estimates.items():
            yield f'pdrelay_depot_link_{metric.name}{{{label},to="{to}"}} {metric.value(estimate)}'
    yield "# HELP pdrelay_depot_link_queued_bytes Bytes that the far depot wants and has not got."
    yield "# TYPE pdrelay_depot_link_queued_bytes gauge"
    for to, estimate in estimates.items():
        for kind, size in (("live", estimate.queued), ("background", estimate.queued_background)):
            yield f'pdrelay_depot_link_queued_bytes{{{label},to="{to}",class="{kind}"}} {size}'
