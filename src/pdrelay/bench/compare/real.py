"""The comparison on real vLLM engines: the demo's trio on this machine's CPU, with its user-space line.

It confirms the ranking that emulated engines show; its times are this machine's, not the evaluation's.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdrelay.bench import trio
from pdrelay.bench.compare import stock
from pdrelay.bench.compare.experiment import BASELINE, POLICY_FILE, STOCK
from pdrelay.bench.compare.player import Job
from pdrelay.bench.compare.run import Progress, Report, Where, conclude, job_of, one, sent_by
from pdrelay.errors import PdrelayError
from pdrelay.perf.profile import load, shipped
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.base import Request
from pdrelay.workload.generators import AgenticRequests

MODEL = "smollm2-135m-instruct"


class Real(NamedTuple):
    """The options that decide it. Real seconds."""

    policies: Sequence[str]
    requests: int = 200
    line_load: float = 0.9
    rtt: float = 0.03
    rate: float = 0.6  # requests a second: three engines share this machine's cores
    prompt: int = 512
    output: float = 32.0
    seed: int = 0
    stock: stock.Peer | None = None  # if it is to play as well

    def trace(self) -> list[Request]:
        """The requests, the same for every policy."""
        workload = AgenticRequests(Arrivals(self.rate), prompt=self.prompt, output_mean=self.output)
        return list(itertools.islice(workload.requests(self.seed), self.requests))

    @property
    def line_rate(self) -> float:
        """Bytes a second that give the load. KV travels in whole pages."""
        trace, kv = self.trace(), load(shipped("smollm2-135m-cpu")).kv
        pages = sum(-(-request.prompt // kv.page_tokens) - request.cached // kv.page_tokens for request in trace)
        return pages * kv.page_bytes / trace[-1].arrival / self.line_load


async def run(experiment: Real, report: Report, progress: Progress) -> None:
    """Fills `report`; what one policy cannot do loses no other's."""
    rate = experiment.line_rate
    report.engines = "vLLM CPU"
    report.setup = {
        "requests": experiment.requests, "seed": experiment.seed, "speed": 1.0, "length_factor": 1.0,
        "prompt_tokens": experiment.prompt, "requests_per_s": experiment.rate, "output_mean": experiment.output,
        "line": "user", "line_note": "", "line_load": experiment.line_load, "line_rate_here_mbit": rate * 8 / 1e6,
        "rtt_s": experiment.rtt, "instances": "1 prefill, 1 relay, 1 main decode (SmolLM2-135M)",
    }  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="pdrelay-bench-") as home:
            for policy in experiment.policies:
                place, job = _place(experiment, policy), partial(_job, experiment, policy)
                await one(report, policy, place, job, Path(home), 1.0, rate, progress)
            if experiment.stock is not None:
                place = stock.running(experiment.stock, MODEL, rate, experiment.rtt, Path(home))
                await one(report, STOCK, place, partial(_job, experiment, BASELINE), Path(home), 1.0, rate, progress)
    except PdrelayError as error:
        report.failures["deployment"] = str(error)
    finally:
        conclude(report)


@asynccontextmanager
async def _place(experiment: Real, policy: str) -> AsyncIterator[Where]:
    options = ["--wan-rate", f"{experiment.line_rate * 8 / 1e3:.0f}kbit", "--wan-rtt", f"{experiment.rtt * 1e3:g}ms"]
    async with trio.running(["--policy", POLICY_FILE[policy][0], *options]) as deployment:
        near = next(host for host in deployment.deployment.host if host.cluster == "dc-a")
        yield Where(deployment.url, None, partial(sent_by, Path(near.socket)))


def _job(experiment: Real, policy: str, url: str) -> Job:
    plain = job_of(experiment.trace(), url, policy, 1.0, experiment.seed, MODEL)
    _, handoff = POLICY_FILE[policy]
    forced = {} if handoff == "dynamic" else {"handoff_mode": handoff}
    return msgspec.structs.replace(plain, extension=plain.extension | forced)
