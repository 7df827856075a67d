"""Decode instances under continuous batching: how large the batch may be, and what it makes."""

from __future__ import annotations

import math
from typing import NamedTuple

from pdrelay.perf.instance import InstanceProfile


class Decoding(NamedTuple):
    """What one request asks of a decode instance, on average."""

    steps: float  # tokens to decode
    context: float  # tokens of a running sequence, averaged over its steps
    first: float  # tokens of the prompt of the one that waits for memory next
    extend: float = 0.0  # seconds of the instance for the tokens that it takes over from a relay


def largest_batch(profile: InstanceProfile, work: Decoding, step_limit: float = math.inf) -> int:
    """Sequences that run at once when there are more than enough: by memory, by the engine's limit and by the step time
    that is allowed. 0 when not even one fits."""
    overhead = profile.kv_fixed / profile.kv_per_token
    tokens = profile.kv_capacity / profile.kv_per_token
    # The next request in line holds a part of the memory free until its whole prompt fits.
    head = (work.first + overhead) / 2
    by_memory = max(1.0, (tokens - head) / (work.context + overhead)) if tokens > work.context + overhead else 0.0
    cost = profile.decode
    per_sequence = cost.per_sequence + cost.per_context_token * work.context
    by_time = math.inf
    if step_limit < math.inf:
        # A hair of tolerance: a published step equals its own limit.
        spare = step_limit * (1 + 1e-9) - cost.fixed
        by_time = 0.0 if spare < 0 else spare / per_sequence if per_sequence else math.inf
    return int(min(profile.max_num_seqs, by_memory, by_time))


def full_rate(profile: InstanceProfile, work: Decoding, batch: int) -> float:
    """Requests/s of one instance whose batch is always full; without bound where nothing is to be decoded."""
    if batch <= 0:
        return 0.0
    step = profile.decode_step_seconds(batch, batch * work.context)
    seconds = work.steps * step / batch + work.extend
    return 1 / seconds if seconds else math.inf


def batch_at(profile: InstanceProfile, work: Decoding, rate: float) -> float:
    """Sequences that run at `rate` requests/s, by Little's law: step and batch grow with one another."""
    cost = profile.decode
    tokens = rate * work.steps / max(1e-9, 1 - rate * work.extend)
    growing = tokens * (cost.per_sequence + cost.per_context_token * work.context)
    return tokens * cost.fixed / (1 - growing) if growing < 1 else math.inf
