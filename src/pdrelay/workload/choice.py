"""A workload as users choose it: a trace, or a generator with its arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pdrelay.cluster.units import parse_time, quantity
from pdrelay.errors import ConfigError
from pdrelay.workload.arrivals import Arrivals, Process
from pdrelay.workload.base import Request
from pdrelay.workload.generators import PDD_EVEN, AgenticRequests, AgentSessions, LongPrompts, Workload
from pdrelay.workload.traces import load as load_trace


class WorkloadTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generator with its arrivals, or a trace."""

    generator: Literal["pdd", "pdd-even", "prfaas", "agent"] = "pdd"
    trace: str = ""
    rate: float = 1.0  # requests, or sessions, a second
    process: Process = "poisson"
    cv: float = 3.0
    swing: float = 0.5
    period: str = "24h"
    prompt: int = 0  # tokens, where the generator has one length; 0 is its own
    output: float = 0.0  # mean tokens; 0 is the generator's own
    longest: int = 0  # agent: tokens of the longest prompt; 0 is the generator's own
    block_tokens: int = 0  # agent: tokens of the blocks in which prefixes are shared; 0 is the generator's own


class Load(NamedTuple):
    """The requests to run. `workload` is None for a trace."""

    requests: Iterator[Request]
    number: int
    workload: Workload | None = None
    skipped: int = 0
    complaints: tuple[str, ...] = ()


def choose(table: WorkloadTable, requests: int, seed: int, base: Path, *, skip_bad: bool = False) -> Load:
    """The first `requests` requests (0: all of a trace); the trace's path is relative to `base`. Raises ConfigError."""
    if table.trace:
        trace = load_trace(base / table.trace, skip_bad=skip_bad)
        count = min(requests, len(trace.requests)) if requests else len(trace.requests)
        return Load(iter(trace.requests), count, None, trace.skipped, trace.complaints)
    if requests < 1:
        raise ConfigError(f"requests: found {requests}, expected at least 1 (0 is all of a trace)")
    workload = _generator(table)
    return Load(workload.requests(seed), requests, workload)


def _generator(table: WorkloadTable) -> Workload:
    if table.rate <= 0:
        raise ConfigError(f"workload.rate: found {table.rate}, expected a number above 0")
    period = quantity("workload.period", table.period, parse_time)
    arrivals = Arrivals(table.rate, table.process, table.cv, table.swing, period)
    if table.generator == "prfaas":
        prompts = LongPrompts(arrivals)
        return prompts._replace(output=int(table.output)) if table.output else prompts
    if table.generator == "agent":
        sessions = AgentSessions(arrivals)
        return sessions._replace(
            output_mean=table.output or sessions.output_mean,
            first=table.prompt or sessions.first,
            longest=table.longest or sessions.longest,
            block_tokens=table.block_tokens or sessions.block_tokens,
            shared=min(sessions.shared, (table.prompt or sessions.first) // 2),
        )
    requests = AgenticRequests(arrivals)
    if table.generator == "pdd-even":
        requests = requests._replace(hits=PDD_EVEN)
    return requests._replace(prompt=table.prompt or requests.prompt, output_mean=table.output or requests.output_mean)
