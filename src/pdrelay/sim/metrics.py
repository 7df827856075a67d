"""What a simulation measured, in the keys of `vllm bench serve` and ours."""

from __future__ import annotations

from math import isnan
from typing import Any

from pdrelay.sim.digest import Digest
from pdrelay.sim.record import Record
from pdrelay.sim.scenario import ServiceLevel

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
TIMES = ("ttft", "ttst", "tpot", "e2el", "largest_gap", "transfer", "transfer_queued")


class Metrics:
    """Adds up records; memory does not grow with their number."""

    def __init__(self, slo: ServiceLevel) -> None:
        self.slo = slo
        self.digests = {name: Digest() for name in TIMES}
        self.relay_per_request = Digest()
        self.good = self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.made = {"prefill": 0, "relay": 0, "main": 0}
        self.counts: dict[str, int] = {"ok": 0, "failed": 0, "refused": 0}
        self.pipelines: dict[str, int] = {}
        self.handoffs = self.rounds = self.preemptions = self.rescues = 0
        self.wan_bytes = 0.0
        self.first_arrival, self.last_end = float("inf"), 0.0

    def add(self, record: Record) -> None:
        """Takes in one request that has ended."""
        self.counts[record.status] += 1
        self.first_arrival = min(self.first_arrival, record.arrival)
        self.last_end = max(self.last_end, record.finished)
        self.preemptions += record.preemptions
        self.rescues += record.rescues
        if record.status != "ok":
            return
        for name, digest in self.digests.items():
            digest.add(getattr(record, name))
        self.input_tokens += record.prompt
        self.output_tokens += record.output
        self.cached_tokens += record.cached
        self.made["prefill"] += record.prefill_tokens
        self.made["relay"] += record.relay_tokens
        self.made["main"] += record.main_tokens
        self.pipelines[record.pipeline] = self.pipelines.get(record.pipeline, 0) + 1
        self.wan_bytes += record.wan_bytes
        if not isnan(record.handoff_start):
            self.handoffs += 1
            self.rounds += record.rounds
        if record.relay is not None:
            self.relay_per_request.add(float(record.relay_tokens))
        self.good += self._is_good(record)

    def _is_good(self, record: Record) -> bool:
        slo = self.slo
        return not (record.ttft > slo.ttft or record.tpot > slo.tpot or record.e2el > slo.e2el)

    def as_dict(self) -> dict[str, Any]:
        """The keys of `vllm bench serve` (times in ms), then ours."""
        duration = max(self.last_end - self.first_arrival, 1e-9)
        made = max(1, sum(self.made.values()))
        result: dict[str, Any] = {
            "duration": duration,
            "completed": self.counts["ok"],
            "failed": self.counts["failed"] + self.counts["refused"],
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.counts["ok"] / duration,
            "request_goodput": self.good / duration,
            "output_throughput": self.output_tokens / duration,
            "total_token_throughput": (self.input_tokens + self.output_tokens) / duration,
        }
        for name, digest in self.digests.items():
            result |= _times(name, digest)
        return result | {
            "refused": self.counts["refused"],
            "cached_tokens": self.cached_tokens,
            "pipelines": self.pipelines,
            "output_share": {tier: tokens / made for tier, tokens in self.made.items()},
            "output_tokens_by_tier": self.made,
            "relay_tokens_per_relayed_request": self.relay_per_request.mean,
            "handoffs": self.handoffs,
            "handoff_rounds_mean": self.rounds / self.handoffs if self.handoffs else 0.0,
            "preemptions": self.preemptions,
            "rescues": self.rescues,
            "wan_bytes": self.wan_bytes,
        }


def _times(name: str, digest: Digest) -> dict[str, float]:
    times = {"mean": digest.mean, "median": digest.percentile(50), "std": digest.std}
    times |= {
        f"p{percent:g}": value for percent, value in zip(PERCENTILES, digest.percentiles(PERCENTILES), strict=True)
    }
    return {f"{figure}_{name}_ms": value * 1e3 for figure, value in times.items()}
