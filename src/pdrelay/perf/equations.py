"""Closed-form times of one engine and one line, in seconds, tokens and bytes."""

from __future__ import annotations

from pdrelay.perf.profile import DecodeCost, ForwardCost


def prefill_seconds(cost: ForwardCost, uncached: float, cached: float = 0) -> float:
    """Time to prefill `uncached` tokens behind `cached` ones; 0 for no token."""
    return _forward_seconds(cost, uncached, cached)


def extend_seconds(cost: ForwardCost, tokens: float, context: float) -> float:
    """Time of one Extend-Decode forward over `tokens` known tokens behind `context` computed ones; 0 for no token."""
    return _forward_seconds(cost, tokens, context)


def decode_step_seconds(cost: DecodeCost, batch: int, context: int) -> float:
    """Time of a decode step of `batch` sequences with `context` tokens in all their contexts together."""
    if not batch:
        return 0.0
    return cost.fixed + cost.per_sequence * batch + cost.per_context_token * context


def transfer_seconds(size: float, rate: float, rtt: float) -> float:
    """Time from sending the first of `size` bytes to the last one's arrival on an idle line of `rate` bytes/s.

    The offer is not counted: it is answered before the first byte is there to be sent.
    """
    return size / rate + rtt / 2


def _forward_seconds(cost: ForwardCost, tokens: float, context: float) -> float:
    if not tokens:
        return 0.0
    pairs = tokens * context + tokens * (tokens + 1) / 2
    return cost.fixed + cost.per_token * tokens + cost.per_pair * pairs
