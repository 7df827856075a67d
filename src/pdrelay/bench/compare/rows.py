"""Requests of a comparison as figures, whether they were played or simulated. All in the evaluation's seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from pdrelay.bench.compare.player import Played
from pdrelay.sim.record import Record

nan = math.nan
TIERS = ("prefill", "relay", "main")
PERCENTILES = (50, 90, 99)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds count from the moment at which it was due; nan is what did not happen."""

    number: int
    due: float
    ttft: float
    ttst: float
    tpot: float
    e2el: float
    largest_gap: float  # from the second token on
    transfer: float  # from prefill's end until main decode has the prompt's KV
    hit_rate: float
    tokens: tuple[int, int, int]  # by tier
    wan_bytes: float
    handoff: float  # when main decode's first token came
    error: str
    moments: list[float]  # of tokens; of simulated requests none


def played(row: Played, speed: float) -> Row:
    """Of a request that ran `speed` times as fast."""
    trace = row.trace
    moments = [moment * speed for moment in row.moments]
    second = next((m for m, count in zip(moments, row.tokens, strict=True) if count > 1), nan)
    first, last = (moments[0], moments[-1]) if moments else (nan, nan)
    done, ready = (_known(trace.get(key), speed) for key in ("prefill_done", "kv_ready"))
    return Row(
        number=row.number, due=row.due * speed, ttft=first, ttst=second, e2el=last,
        tpot=(last - first) / (row.output - 1) if row.output > 1 else nan,
        largest_gap=max((b - a for a, b in pairwise(moments[1:])), default=nan),  # TTST tells the one before
        transfer=0.0 if ready < done else ready - done,  # NaN stays NaN, which max() would lose
        hit_rate=trace.get("hit_rate", nan), tokens=_by_tier(row),
        wan_bytes=trace.get("wan_bytes", 0), handoff=_known(trace.get("handoff_done"), speed), error=row.error,
        moments=moments,
    )  # fmt: skip


def simulated(record: Record, speed: float, wire_ratio: float) -> Row:
    """Of a request simulated in real seconds; the line took `wire_ratio` bytes for each of KV."""
    at = record.arrival
    return Row(
        number=record.number, due=at * speed, ttft=record.ttft * speed, ttst=record.ttst * speed,
        tpot=record.tpot * speed, e2el=record.e2el * speed, largest_gap=record.largest_gap * speed,
        transfer=(record.kv_ready - record.prefill_end) * speed, hit_rate=record.hit_rate,
        tokens=(record.prefill_tokens, record.relay_tokens, record.main_tokens),
        wan_bytes=record.wan_bytes / wire_ratio,
        handoff=(record.handoff_done - at) * speed, error="" if record.status == "ok" else record.status, moments=[],
    )  # fmt: skip


def figures(rows: Sequence[Row], line_rate: float, sent: float | None = None) -> dict[str, Any]:
    """The figures of one policy; `line_rate` in bytes of the rows' own second. Failed requests count as such alone.

    `sent` are the bytes of KV that the depot sent, if it was asked: a request that ended on the relay does not see the
    end of its transfer.
    """
    done = [row for row in rows if not row.error]
    result: dict[str, Any] = {"completed": len(done), "failed": len(rows) - len(done)}
    for name in ("ttft", "ttst", "tpot", "e2el", "transfer"):
        found = values(done, name)
        for q in PERCENTILES:
            result[f"p{q}_{name}_ms"] = float(np.percentile(found, q)) * 1e3 if found else None
    made = np.array([row.tokens for row in done]).sum(axis=0) if done else np.zeros(3)
    total = float(made.sum())
    sent = sum(row.wan_bytes for row in rows) if sent is None else sent
    result |= {
        "max_gap_ms": max(values(done, "largest_gap"), default=nan) * 1e3,
        "p99_gap_ms": float(np.percentile(values(done, "largest_gap") or [nan], 99)) * 1e3,
        "relay_share": float(made[1]) / total if total else 0.0,
        "output_tokens": int(total),
        "tokens_by_tier": {tier: int(count) for tier, count in zip(TIERS, made, strict=True)},
        "wan_bytes": int(sent),
        "line_use": sent / line_rate / busy_span(rows) if rows else 0.0,
        "handoffs": len(values(done, "handoff")),
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in result.items()}


def busy_span(rows: Sequence[Row]) -> float:
    """Seconds from the first request to the last transfer's end, or to the last arrival if that is later."""
    ends = [row.due + row.transfer + row.ttft for row in rows if math.isfinite(row.transfer + row.ttft)]
    return max(max(ends, default=0.0), max(row.due for row in rows), 1e-9) - min(row.due for row in rows)


def values(rows: Sequence[Row], name: str) -> list[float]:
    """All finite values of a time."""
    return [value for row in rows if math.isfinite(value := getattr(row, name))]


def _by_tier(row: Played) -> tuple[int, int, int]:
    """Who made the tokens; a peer has no tiers: it decodes across the line."""
    if "main_tokens" not in row.trace:
        return 0, 0, row.tokens[-1] if row.tokens else 0
    prefill, relay, main = (row.trace[f"{tier}_tokens"] for tier in TIERS)
    return prefill, relay, main


def _known(value: float | None, speed: float) -> float:
    return nan if value is None else value * speed
