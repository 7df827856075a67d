"""Waiting at finite load: the M/G/c queue by the Allen-Cunneen approximation, and percentiles of waiting plus service.

Sources: A. O. Allen, Probability, Statistics and Queueing Theory, 1990; the conditional wait is taken as exponential,
which is exact for M/M/c and the heavy-traffic limit of M/G/c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdrelay.perf.lengths import Array


class Wait(NamedTuple):
    """How long a request waits for a server: with probability `busy` at all, then `mean` seconds on average."""

    busy: float
    mean: float  # infinite when the queue grows for ever

    @property
    def average(self) -> float:
        """Seconds over all requests."""
        return self.busy * self.mean if self.busy else 0.0


NO_WAIT = Wait(0.0, 0.0)

PLACED = 0.7
"""Of prefill instances under our policies, fitted to the simulator: 1 to 24 instances at 50 to 95 % load, two spreads
of lengths. It covers, too, that a prefill ends with a step in which the next request's first chunk is computed."""


def wait(rate: float, servers: float, seconds: float, square: float, placed: float = 0.0) -> Wait:
    """The wait of `rate` requests/s at `servers` servers; service takes `seconds` on average, `square` its square's.

    `placed` is the part of a rest of service that a request waits beside that, because it goes to one server when it
    arrives and not to the first that is free.
    """
    if rate <= 0 or seconds <= 0:
        return NO_WAIT
    load = rate * seconds
    if load >= servers:
        return Wait(1.0, math.inf)
    rest = square / seconds / 2  # of the service that is met; (1 + CV^2) / 2 of the mean
    return Wait(erlang_c(servers, load), rest / (servers - load) + placed * rest)


def erlang_c(servers: float, load: float) -> float:
    """Probability that all servers are busy; `load` is the mean number of busy ones. `servers` need not be whole."""
    whole = max(1, math.floor(servers))
    loss = 1.0
    for number in range(1, whole + 1):  # the recursion of Erlang's B does not overflow
        loss = load * loss / (number + load * loss)
    used = min(load / servers, 1.0)
    return loss / (1 - used * (1 - loss)) if used < 1 else 1.0


class Stream(NamedTuple):
    """Requests that share a queue: `weight` of all, how long each takes once it is served, and their wait."""

    weight: Array  # of each point
    seconds: Array  # of each point
    waits: Wait


def average(streams: Sequence[Stream]) -> float:
    """Mean of wait and service over all requests."""
    total = sum(float(s.weight.sum()) for s in streams)
    return sum(float(s.weight @ (s.seconds + s.waits.average)) for s in streams if s.weight.any()) / total


def share_within(streams: Sequence[Stream], limit: float) -> float:
    """Share of all requests whose wait and service together take at most `limit` seconds."""
    total = sum(float(s.weight.sum()) for s in streams)
    return sum(float(s.weight @ _within(s, limit)) for s in streams if s.weight.any()) / total


def _within(stream: Stream, limit: float) -> Array:
    spare = limit - stream.seconds
    busy, mean = stream.waits
    if math.isinf(mean):
        late = np.full_like(spare, busy)
    elif mean < 1e-9:
        late = np.zeros_like(spare)
    else:
        late = busy * np.exp(-np.maximum(spare, 0.0) / mean)
    within: Array = np.where(spare >= 0, 1 - late, 0.0)
    return within


def percentile(streams: Sequence[Stream], share: float) -> float:
    """The seconds within which `share` of all requests are done; infinite where a queue grows for ever."""
    longest = max(float(s.seconds.max()) for s in streams if s.weight.any())
    least, most = 0.0, max(longest, 1e-9)
    while share_within(streams, most) < share:
        most *= 2
        if most > 1e9:
            return math.inf
    for _ in range(50):
        middle = (least + most) / 2
        least, most = (least, middle) if share_within(streams, middle) >= share else (middle, most)
    return most
