"""The HTML report of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pdrelay.sim.digest import Digest
from pdrelay.sim.simulation import Outcome
from pdrelay.sim.timeline import Sample
from pdrelay.ui.charts import Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page
from pdrelay.workload.summary import Comparison

TIMES = {
    "ttft": "time to first token", "ttst": "time to second token", "tpot": "time per output token",
    "e2el": "end to end", "largest_gap": "largest gap", "transfer": "on the line",
    "transfer_queued": "for a connection",
}  # fmt: skip
SECONDS = Axis("seconds of simulated time")


def html(title: str, outcome: Outcome, comparisons: Sequence[Comparison] = ()) -> str:
    """A page with latencies, use of lines and instances, queues and output rates."""
    figures = outcome.as_dict()
    sections = [
        Section("Requests", [_requests(figures)]),
        Section("Latencies", [_latencies(outcome)], _latency_charts(outcome)),
        Section("Over time", charts=_time_charts(outcome.timeline.samples)),
        Section("Lines", [_lines(outcome)]),
        Section("Instances", [_instances(outcome)]),
    ]
    if comparisons:
        sections.insert(1, Section("Workload beside what its paper prints", [_workload(comparisons)]))
    return page(title, sections)


def _requests(figures: dict[str, Any]) -> Table:
    rows = [
        ("completed", f"{figures['completed']:,}"),
        ("failed or refused", f"{figures['failed']:,}"),
        ("duration", f"{figures['duration']:,.1f} s"),
        ("requests/s", f"{figures['request_throughput']:.3f}"),
        ("of them good", f"{figures['request_goodput']:.3f}"),
        ("output tokens/s", f"{figures['output_throughput']:,.1f}"),
        ("handoffs", f"{figures['handoffs']:,}"),
        *((f"requests {name}", f"{count:,}") for name, count in figures["pipelines"].items()),
        *((f"output of {tier}", f"{share:.2%}") for tier, share in figures["output_share"].items()),
    ]
    return Table(("", ""), rows)


def _latencies(outcome: Outcome) -> Table:
    rows = []
    for name, label in TIMES.items():
        digest = outcome.metrics.digests[name]
        values = [digest.mean, *digest.percentiles([50, 90, 95, 99]), digest.largest if digest.count else 0.0]
        rows.append((label, *(f"{value:,.3f}" for value in values)))
    return Table(("seconds", "mean", "P50", "P90", "P95", "P99", "most"), rows)


def _latency_charts(outcome: Outcome) -> list[tuple[str, str]]:
    def chart(*names: str) -> str:
        lines = [Series(TIMES[name], _curve(outcome.metrics.digests[name])) for name in names]
        return line_chart(lines, Axis("seconds", logarithmic=True), Axis("share of requests", least=0, most=1))

    return [
        ("TTFT and TTST", chart("ttft", "ttst")),
        ("TPOT and largest gap", chart("tpot", "largest_gap")),
        ("Transfers", chart("transfer", "transfer_queued")),
        ("End to end", chart("e2el")),
    ]


def _curve(digest: Digest) -> list[tuple[float, float]]:
    return digest.curve(200) if digest.count else []


def _time_charts(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    pairs = [(a, b) for a, b in pairwise(samples) if b.time > a.time]
    names = list(samples[0].line_bytes) if samples else []
    lines = [
        Series(name, [(b.time, (b.line_bytes[name] - a.line_bytes[name]) * 8e-9 / (b.time - a.time)) for a, b in pairs])
        for name in names
    ]
    tokens = [
        Series(label, [(b.time, max(0, getattr(b, key) - getattr(a, key)) / (b.time - a.time)) for a, b in pairs])
        for label, key in (("main decode", "main_tokens"), ("relay", "relay_tokens"))
    ]
    share = [(b.time, _share(b.relay_tokens - a.relay_tokens, b.main_tokens - a.main_tokens)) for a, b in pairs]
    queues = [
        Series(label, [(sample.time, float(getattr(sample, key))) for sample in samples])
        for label, key in (
            ("prefill", "prefill_queue"), ("decode", "decode_queue"), ("connections", "line_queue"),
        )
    ]  # fmt: skip
    running = [
        Series(label, [(sample.time, float(getattr(sample, key))) for sample in samples])
        for label, key in (("decode", "decode_running"), ("relay", "relay_running"))
    ]
    return [
        ("Lines", line_chart(lines, SECONDS, Axis("Gbit/s", least=0))),
        ("Output rate", line_chart(tokens, SECONDS, Axis("tokens/s", least=0))),
        ("Relay's share of output", line_chart([Series("relay", share)], SECONDS, Axis("share", least=0, most=1))),
        ("Queues", line_chart(queues, SECONDS, Axis("requests", least=0))),
        ("Running", line_chart(running, SECONDS, Axis("requests", least=0))),
    ]


def _share(part: int, rest: int) -> float:
    return max(0, part) / max(1, part + rest)


def _lines(outcome: Outcome) -> Table:
    rows = [
        (name, f"{line['rate'] * 8e-9:.3g} Gbit/s", f"{line['utilisation']:.1%}",
         f"{line['connection_utilisation']:.1%}", f"{line['sent_bytes'] / 1e9:,.2f} GB", f"{line['transfers']:,.0f}")
        for name, line in outcome.lines.items()
    ]  # fmt: skip
    return Table(("line", "rate", "used", "connections used", "sent", "transfers"), rows)


def _instances(outcome: Outcome) -> Table:
    rows = [
        (name, f"{each['busy']:.1%}", f"{each['output_tokens']:,.0f}", f"{each['preemptions']:,.0f}",
         f"{each['evicted_blocks']:,.0f}")
        for name, each in outcome.engines.items()
    ]  # fmt: skip
    return Table(("instance", "busy", "decoded tokens", "preemptions", "evicted blocks"), rows)


def _workload(comparisons: Sequence[Comparison]) -> Table:
    rows = [(c.quantity, f"{c.published:,.4g}", f"{c.obtained:,.4g}", f"{c.error:+.1%}", c.source) for c in comparisons]
    return Table(("quantity", "published", "here", "error", "source"), rows)
