"""What is compared: PDD's evaluation, cut down to what one machine can run in real time.

Times are those of the evaluation (`reproduce/pdd_setup.py`), all divided by `speed`. Prompts have LENGTH_FACTOR fewer
tokens, each with as much more work and KV; the KV's bytes and the line's rate are divided alike, so that a transfer
takes as long as at full size. The line's rate follows from the load that it is to have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pdrelay.bench.settings import Kind
from pdrelay.cluster.topology import Role
from pdrelay.reproduce import pdd_setup as paper
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.base import Request
from pdrelay.workload.generators import AgenticRequests

Policy = Literal["pdd", "cdc_pd", "idc_pd"]
Mode = Literal["one_shot", "catch_up", "dynamic"]

LENGTH_FACTOR = 16
PAGE_TOKENS, LAYERS, HEAD = 16, 4, 64
KV_PER_TOKEN = 2 * LAYERS * 2 * HEAD * 2  # bytes here: keys and values of two heads in 16 bits
PREFILLS = 2
PREFILL_LOAD = 0.4
"""Share of the time that prefill instances work."""
POLICY_FILE: dict[str, tuple[Policy, Mode]] = {
    "idc_pd": ("idc_pd", "dynamic"),
    "cdc_pd": ("cdc_pd", "dynamic"),
    "pdd_one_shot": ("pdd", "one_shot"),
    "pdd_catch_up": ("pdd", "catch_up"),
    "pdd": ("pdd", "dynamic"),
}
"""What is compared: its name in results to policy and handoff mode."""
POLICIES = tuple(POLICY_FILE)
BASELINE, BEST, OURS = "cdc_pd", "idc_pd", "pdd"
STOCK = "stock_pd"
"""Not ours: stock vLLM with NixlConnector, decode across the line."""


class Experiment(NamedTuple):
    """The options that decide it. Seconds here and in results are the evaluation's, unless they are called real."""

    policies: Sequence[str] = POLICIES
    requests: int = 200
    line_load: float = 0.9
    rtt: float = 0.03
    speed: float = 5.0
    output: float = 1000.0  # mean tokens
    seed: int = 0
    line: Kind | None = None  # None: namespaces if they can be had

    @property
    def prompt(self) -> int:
        """Tokens of a prompt here."""
        return paper.PROMPT // LENGTH_FACTOR

    @property
    def rate(self) -> float:
        """Requests a second."""
        return PREFILL_LOAD * PREFILLS / self.prefill_seconds(paper.PROMPT * 0.1)

    @staticmethod
    def prefill_seconds(uncached: float) -> float:
        """Of so many tokens of the evaluation's."""
        return paper.PREFILL.fixed + paper.PREFILL.per_token * uncached

    def trace(self) -> list[Request]:
        """The requests, the same for every policy; lengths are those here."""
        workload = AgenticRequests(Arrivals(self.rate), prompt=self.prompt, output_mean=self.output)
        return list(itertools.islice(workload.requests(self.seed), self.requests))

    def missing_bytes(self) -> float:
        """Mean KV of a request that crosses the line, here."""
        return sum(request.prompt - request.cached for request in self.trace()) * KV_PER_TOKEN / self.requests

    @property
    def real_line_rate(self) -> float:
        """Bytes a real second that give the load, with the requests of this very trace."""
        trace = self.trace()
        span = trace[-1].arrival * self.requests / max(self.requests - 1, 1)
        return self.missing_bytes() * self.requests / span * self.speed / self.line_load

    @property
    def modelled_line_rate(self) -> float:
        """Bytes a second of a line for the evaluation's KV."""
        return self.real_line_rate / self.speed * paper.KV_PER_TOKEN * LENGTH_FACTOR / KV_PER_TOKEN

    def profile(self, role: Role, vocabulary: str) -> str:
        """The profile file of the emulated engines of a role, in real seconds; `vocabulary` is a table of one."""
        real = 1 / self.speed
        sequences = 1 if role is Role.PREFILL else 256
        return f"""\
description = "PDD's evaluation, {role.value}, {self.speed:g} times as fast, prompts cut by {LENGTH_FACTOR}"
[kv]
layers = {LAYERS}
heads = 2
head_size = {HEAD}
dtype = "bfloat16"
page_tokens = {PAGE_TOKENS}
capacity = "64GiB"
[prefill]
fixed = {paper.PREFILL.fixed * real}
per_token = {paper.PREFILL.per_token * LENGTH_FACTOR * real}
per_pair = 0.0
[decode]
fixed = {paper.H100_STEP * real}
per_sequence = 0.0
per_context_token = 0.0
[extend]
fixed = {paper.H100_STEP * real}
per_token = {paper.EXTEND_PER_TOKEN * real}
per_pair = 0.0
[limits]
max_num_seqs = {sequences}
prefill_chunk = 1000000
{vocabulary}"""


def write_profiles(experiment: Experiment, home: Path, like: Path) -> dict[Role, Path]:
    """The profile files, below `home`, with the vocabulary of profile `like`."""
    text, paths = like.read_text(), {}
    vocabulary = text[text.index("[vocabulary]") :]
    for role in (Role.PREFILL, Role.DECODE):
        paths[role] = home / f"{role.value}.toml"
        paths[role].write_text(experiment.profile(role, vocabulary))
    return paths
