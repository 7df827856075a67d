"""What `/metrics` shows of the gateway. Times are in seconds, as the client sees them at this end of the line."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from pdrelay.gateway.base import Tier, TokenBatch, Trace
from pdrelay.gateway.loop_metrics import LoopCounter, LoopHistogram
from pdrelay.gateway.parity import CacheParity

# In Prometheus' text format they would be a gauge beside every counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated there

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_STEP = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40)
_WHOLE = (0.1, 0.3, 0.5, 1, 1.5, 2, 5, 10, 20, 30, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """The metrics of one gateway process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pdrelay_gateway_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> LoopHistogram:
            return LoopHistogram(f"pdrelay_gateway_{name}_seconds", text, buckets, self.registry)

        self.requests = counter(
            "requests",
            "Requests that ended, by HTTP status; 499 when the client left. A stream that broke counts as its error.",
            "endpoint",
            "pipeline",
            "status",
        )
        self._ended: dict[tuple[str, str, int], Counter] = {}  # children of it, which take long to look up
        self.running = Gauge("pdrelay_gateway_requests_running", "Requests under way", registry=self.registry)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = LoopCounter(
            "pdrelay_gateway_generation_tokens", "Tokens sent to clients, by the tier that made them", "tier",
            Tier, self.registry,
        )  # fmt: skip
        self.wan_bytes = counter("wan_bytes", "KV bytes that crossed the wide-area line")
        self.wan_saved_bytes = counter("wan_saved_bytes", "KV bytes that the far side held already")
        self.prefill_hits = counter("prefill_hit_tokens", "Prompt tokens that prefill did not have to compute")
        self.main_hits = counter("main_hit_tokens", "Prompt tokens that main decode held when requests were placed")
        self.parity = CacheParity()
        parity = Gauge(
            "pdrelay_gateway_cache_parity",
            "Prefill's prefix hit rate less main decode's, of the running hour and of the last full one",
            ["hour"],
            registry=self.registry,
        )
        parity.labels("running").set_function(self.parity.running)
        parity.labels("last").set_function(self.parity.last)
        self.handoffs = counter("handoffs", "Handoffs from relay to main decode", "mode")
        self.first = histogram("time_to_first_token", "From arrival to the first token", _FIRST)
        self.second = histogram("time_to_second_token", "From arrival to the second token", _FIRST)
        self.gap = histogram("inter_token_latency", "Between successive batches of tokens of one request", _STEP)
        self.handoff_gap = histogram("handoff_gap", "Between the relay's last and main decode's first token", _STEP)
        self.whole = histogram("e2e_request_latency", "From arrival to the end, of requests that succeeded", _WHOLE)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def hits(self, prompt: int, prefill: float, main: float) -> None:
        """Takes note of what both sides held of a prompt of so many tokens."""
        self.prefill_hits.inc(prefill * prompt)
        self.main_hits.inc(main * prompt)
        self.parity.observe(prompt, prefill, main)

    def refused(self, endpoint: str, status: int) -> None:
        """Counts a request that never reached an engine."""
        self.ended(endpoint, "none", status)

    def ended(self, endpoint: str, pipeline: str, status: int) -> None:
        """Counts a request."""
        key = endpoint, pipeline, status
        child = self._ended.get(key)
        if child is None:
            child = self._ended[key] = self.requests.labels(*key)
        child.inc()


class _Last:
    """When and from where tokens of a choice came last."""

    __slots__ = ("at", "tier")

    def __init__(self, at: float, tier: Tier) -> None:
        self.at, self.tier = at, tier


class Meter:
    """Measures one accepted request."""

    def __init__(self, metrics: Metrics, endpoint: str, arrival: float) -> None:
        """`arrival` is time.monotonic() when the request came."""
        self._metrics, self._endpoint, self._arrival = metrics, endpoint, arrival
        self._last: dict[int, _Last] = {}  # by choice
        metrics.running.inc()

    def prompt(self, tokens: int) -> None:
        """Takes note of a prompt."""
        self._metrics.prompt_tokens.inc(tokens)

    def batch(self, batch: TokenBatch, choice: int = 0) -> None:
        """Takes note of tokens that are about to be sent."""
        self.tokens(batch.index, len(batch.ids), batch.tier, choice)

    def tokens(self, index: int, count: int, tier: Tier, choice: int = 0) -> None:
        """Takes note of `count` tokens from `index` on that are about to be sent."""
        now, metrics = time.monotonic(), self._metrics
        last = self._last.get(choice)
        if last is None:
            self._last[choice] = _Last(now, tier)
            metrics.first.observe(now - self._arrival)
        else:
            metrics.gap.observe(now - last.at)
            if last.tier is not tier:
                if last.tier is Tier.RELAY and tier is Tier.MAIN:
                    metrics.handoff_gap.observe(now - last.at)
                last.tier = tier
            last.at = now
        if index <= 1 < index + count:
            metrics.second.observe(now - self._arrival)
        metrics.generation_tokens.counts[tier] += count

    def more(self, count: int) -> None:
        """Takes note of `count` further tokens of who made the latest, not the first two. Only with one choice."""
        now, last, metrics = time.monotonic(), self._last[0], self._metrics
        metrics.gap.observe(now - last.at)
        last.at = now
        metrics.generation_tokens.counts[last.tier] += count

    def end(self, status: int, traces: Sequence[Trace]) -> None:
        """Takes note of the end; `traces` are those of the choices, as far as they can be had."""
        metrics = self._metrics
        metrics.running.dec()
        metrics.ended(self._endpoint, traces[0].pipeline if traces else "none", status)
        if status < 400:
            metrics.whole.observe(time.monotonic() - self._arrival)
        for trace in traces:
            if trace.prefill_hit_rate is not None:
                metrics.hits(trace.prompt_tokens, trace.prefill_hit_rate, trace.hit_rate)
            metrics.wan_bytes.inc(trace.wan_bytes)
            metrics.wan_saved_bytes.inc(trace.wan_bytes_saved)
            if trace.handoff_mode is not None:
                metrics.handoffs.labels(trace.handoff_mode).inc()
