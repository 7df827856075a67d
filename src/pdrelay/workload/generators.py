"""Workloads of the papers: endless streams of requests, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from pdrelay.workload.arrivals import CHUNK, Arrivals
from pdrelay.workload.base import Request
from pdrelay.workload.hits import SkewedHits, skewed_hits


class Target(NamedTuple):
    """A figure that the paper prints of its workload."""

    quantity: str  # a key of workload/summary.py
    published: float
    source: str


class Workload(Protocol):
    """A stream of requests."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What the paper says of it."""
        ...

    def requests(self, seed: int) -> Iterator[Request]:
        """Requests by arrival, without end."""
        ...


PDD_HITS = skewed_hits(mean=0.90, share=0.75, above=0.95, low=0.02, high=0.99)
"""PDD, section 2.2: 2 to 99 %, mean 0.90, 70 to 80 % above 0.95. The middle of that range is taken."""

PDD_EVEN = SkewedHits(1.0, 1.0, 0.85, 0.95)
"""PDD, Table 2, Narrow&Even: uniform from 85 to 95 %."""


class AgenticRequests(NamedTuple):
    """PDD's agentic workload: prompts of one length, skewed hit rates, outputs that are mostly short.

    Outputs are gamma distributed: shape 0.4112 is where 30 % lie below a tenth of the mean.
    """

    arrivals: Arrivals
    hits: SkewedHits = PDD_HITS
    prompt: int = 64_000
    output_mean: float = 1000.0
    output_shape: float = 0.4112

    @property
    def targets(self) -> tuple[Target, ...]:
        if self.hits is PDD_EVEN:
            return (Target("hit_mean", 0.90, "PDD, section 2.2"),)
        return (
            Target("hit_mean", 0.90, "PDD, section 2.2"),
            Target("hit_above_0.95", 0.75, "PDD, section 2.2: 70 to 80 %"),
            Target("output_mean", 1000, "PDD, section 5.1"),
            Target("output_below_100", 0.30, "PDD, section 5.1"),
        )

    def requests(self, seed: int) -> Iterator[Request]:
        random = np.random.default_rng(seed)
        moments = self.arrivals.times(random)
        while True:
            cached = np.minimum(self.hits.sample(random, CHUNK) * self.prompt, self.prompt - 1).astype(int)
            scale = self.output_mean / self.output_shape
            outputs = np.maximum(1, np.rint(random.gamma(self.output_shape, scale, CHUNK))).astype(int)
            for hit, output in zip(cached.tolist(), outputs.tolist(), strict=True):
                yield Request(next(moments), self.prompt, output, cached=hit)


class LongPrompts(NamedTuple):
    """PrfaaS's case study: truncated lognormal lengths that are all uncached, outputs of one length."""

    arrivals: Arrivals
    mu: float = 9.90
    sigma: float = 1.00
    shortest: int = 128
    longest: int = 131_072
    output: int = 1024

    @property
    def targets(self) -> tuple[Target, ...]:
        return (
            Target("prompt_mean", 27_000, "PrfaaS, section 4.1: about 27K"),
            Target("prompt_above_19400", 0.496, "PrfaaS, section 4.3: offloaded share"),
        )

    def requests(self, seed: int) -> Iterator[Request]:
        random = np.random.default_rng(seed)
        moments = self.arrivals.times(random)
        while True:
            lengths = np.rint(random.lognormal(self.mu, self.sigma, CHUNK)).astype(int)
            for length in lengths[(lengths >= self.shortest) & (lengths <= self.longest)].tolist():
                yield Request(next(moments), length, self.output, cached=0)


class AgentSessions(NamedTuple):
    """Sessions of a coding agent: each turn repeats the whole conversation and adds to it, after some thought.

    A session starts with a prompt of `first` tokens (its first `shared` tokens are the same tool and system prompt for
    all), and has `turns` turns on average (geometric); a turn adds the answer before it and `added` tokens.
    """

    arrivals: Arrivals  # of sessions
    turns: float = 50.0
    first: int = 30_000
    shared: int = 8192
    added: float = 1500.0
    output_mean: float = 434.0
    think: float = 10.0  # seconds, median; lognormal with sigma 1
    longest: int = 131_072
    block_tokens: int = 512

    @property
    def targets(self) -> tuple[Target, ...]:
        if self != AgentSessions(self.arrivals):
            return ()  # changed lengths are nobody's
        return (
            Target("output_mean", 434, "kv-cache-tester, up to 131,072 tokens of prompt"),
            Target("hit_mean", 0.943, "kv-cache-tester, up to 131,072 tokens of prompt"),
        )

    def requests(self, seed: int) -> Iterator[Request]:
        random = np.random.default_rng(seed)
        blocks = -(-self.longest // self.block_tokens)
        for number, moment in enumerate(self.arrivals.times(random)):
            # Whole blocks of the shared prompt have the same ids in every session, all others belong to one.
            first_own = self.shared // self.block_tokens
            own = first_own + number * blocks
            ids = (*range(first_own), *range(own, own + blocks - first_own))
            yield self._session(random, moment, f"s{number}", ids)

    def _session(self, random: np.random.Generator, moment: float, name: str, ids: tuple[int, ...]) -> Request:
        turns: list[Request] = []
        prompt = self.first
        for turn in range(int(random.geometric(1 / self.turns))):
            if prompt > self.longest:
                break
            output = max(1, round(random.exponential(self.output_mean)))
            think = self.think * float(random.lognormal(0.0, 1.0)) if turn else 0.0
            whole = tuple(ids[: prompt // self.block_tokens])
            turns.append(
                Request(moment if not turn else 0.0, prompt, output, whole, session=name, think=think,
                        block_tokens=self.block_tokens)
            )  # fmt: skip
            prompt += output + max(1, round(random.exponential(self.added)))
        head = turns[-1]
        for request in reversed(turns[:-1]):
            head = request._replace(then=head)
        return head
