"""Rounds in which every gateway has its turn, each time newly launched."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from pdrelay.bench.children import Child
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.relay import contestants
from pdrelay.bench.relay.client import Plan
from pdrelay.bench.relay.contestants import MODEL, Site
from pdrelay.bench.relay.load import Result, Task
from pdrelay.bench.stats import Estimate, estimate, median_of, median_ratio
from pdrelay.cluster.units import parse_address
from pdrelay.errors import BenchError

OURS, DIRECT = "pdrelay", "no gateway"
PEERS = ("vllm_router", "smg", "sglang_router")
PACE = 0.02
"""Seconds between the tokens of a paced stream: 50 tokens a second."""

Progress = Callable[[str], None]


class Settings(NamedTuple):
    """The options of the command."""

    model: Path
    profile: Path
    peers_at: Path
    peers: Sequence[str] = PEERS
    rounds: int = 9
    seconds: float = 3.0  # of one measurement
    warm_up: float = 1.0
    tokens: int = 512  # of a stream in lockstep


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of one gateway. Times in milliseconds."""

    tokens_per_s_64: float
    tokens_per_s_256: float
    cpu_s_per_m_tokens: float  # at 256 streams in lockstep
    gateway_core_share: float  # then
    load_core_share: float
    ttft_ms_p50: float  # 32 streams
    ttft_ms_p99: float
    lag_ms_p50: float  # of a token, from its making to the client, at 256 streams of 50 tokens/s
    lag_ms_p99: float
    core_share_paced: float
    memory_mb: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway: medians over the rounds, and the ratio to ours in the same round."""

    name: str
    version: str
    medians: Sample
    added_ttft_ms_p50: float
    added_ttft_ms_p99: float
    added_lag_ms_p50: float
    tokens_ratio: Estimate | None  # ours over this one's, at 256 streams
    cpu_ratio: Estimate | None  # CPU per token, ours over this one's


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "gateway"
    machine: Machine
    command: str
    rounds: int = 0
    cores: str = ""
    rows: list[Row] = []
    samples: dict[str, list[Sample]] = {}
    failures: dict[str, str] = {}


def new_report(command: str) -> Report:
    """An empty report."""
    return Report(machine=describe(), command=command)


async def run(settings: Settings, report: Report, progress: Progress) -> None:
    """Fills `report`; a gateway that fails does not lose what the others showed. Raises BenchError without engines."""
    versions = {DIRECT: "", OURS: report.machine.pdrelay}
    for name in settings.peers:
        try:
            versions[name] = await contestants.version_of(settings.peers_at / f"{name}.py")
        except BenchError as error:
            report.failures[name] = str(error)
    with tempfile.TemporaryDirectory(prefix="pdrelay-bench-") as home:
        async with contestants.site(Path(home), settings.model, settings.profile) as site:
            report.cores = "pinned" if site.cores.gateway is not None else "gateway and load share one core"
            try:
                await _rounds(settings, report, site, list(versions), progress)
            finally:
                report.rows = _rows(report.samples, versions)


async def _rounds(settings: Settings, report: Report, site: Site, names: list[str], progress: Progress) -> None:
    absent = set(report.failures)
    for number in range(settings.rounds):
        for name in names:
            if name in absent:
                continue
            progress(f"round {number + 1} of {settings.rounds}: {name}")
            try:
                async with _launch(settings, site, name) as (child, port):
                    sample = await _sample(settings, site, child, port)
                report.samples.setdefault(name, []).append(sample)
            except BenchError as error:
                report.failures[name] = f"round {number + 1}: {error}"
        report.rounds = number + 1


@asynccontextmanager
async def _launch(settings: Settings, site: Site, name: str) -> AsyncIterator[tuple[Child, int]]:
    gateway = parse_address(site.gateway)[1]
    if name == DIRECT:
        yield site.load, parse_address(site.openai)[1]
        return
    launch: Callable[[], AbstractAsyncContextManager[Child]] = (
        partial(contestants.ours, site)
        if name == OURS
        else partial(contestants.peer, site, settings.peers_at / f"{name}.py")
    )
    async with launch() as child:
        yield child, gateway


async def _sample(settings: Settings, site: Site, child: Child, port: int) -> Sample:
    def task(streams: int, tokens: int, interval: float, pause: float = 0.0) -> Task:
        plan = Plan(host="127.0.0.1", port=port, streams=streams, tokens=tokens, model=MODEL, pause=pause)
        return Task(plan=plan, interval=interval, warm_up=settings.warm_up, seconds=settings.seconds, pid=child.pid)

    few = await site.measure(task(64, settings.tokens, 0.0))
    many = await site.measure(task(256, settings.tokens, 0.0))
    first = await site.measure(task(32, 16, PACE, pause=0.2))
    paced = await site.measure(task(256, 500, PACE, pause=0.2))
    if not (few.tokens and many.tokens and paced.tokens):
        raise BenchError("no token arrived")
    return Sample(
        tokens_per_s_64=few.tokens / few.seconds,
        tokens_per_s_256=many.tokens / many.seconds,
        cpu_s_per_m_tokens=many.cpu_seconds / many.tokens * 1e6,
        gateway_core_share=many.cpu_seconds / many.seconds,
        load_core_share=many.load_cpu_seconds / many.seconds,
        ttft_ms_p50=_percentile(first.ttfts, 50),
        ttft_ms_p99=_percentile(first.ttfts, 99),
        lag_ms_p50=_percentile(paced.lags, 50),
        lag_ms_p99=_percentile(paced.lags, 99),
        core_share_paced=paced.cpu_seconds / paced.seconds,
        memory_mb=_memory(few, many, first, paced),
    )


def _percentile(seconds: Sequence[float], q: float) -> float:
    if not seconds:
        raise BenchError("no token arrived")
    return float(np.percentile(seconds, q)) * 1e3


def _memory(*results: Result) -> float:
    return max(result.memory for result in results) / 1e6


def _rows(samples: dict[str, list[Sample]], versions: dict[str, str]) -> list[Row]:
    """Of the gateways that were measured; ratios over the rounds in which both were."""
    medians = {name: _medians(taken) for name, taken in samples.items()}
    if DIRECT not in medians:
        return []
    direct = medians[DIRECT]
    return [
        Row(
            name=name,
            version=versions[name],
            medians=found,
            added_ttft_ms_p50=found.ttft_ms_p50 - direct.ttft_ms_p50,
            added_ttft_ms_p99=found.ttft_ms_p99 - direct.ttft_ms_p99,
            added_lag_ms_p50=found.lag_ms_p50 - direct.lag_ms_p50,
            tokens_ratio=_ratio(samples, name, "tokens_per_s_256"),
            cpu_ratio=_ratio(samples, name, "cpu_s_per_m_tokens"),
        )
        for name, found in medians.items()
    ]


def _medians(taken: Sequence[Sample]) -> Sample:
    fields = Sample.__struct_fields__
    return Sample(**{field: float(median_of(np.array([getattr(s, field) for s in taken]))) for field in fields})


def _ratio(samples: dict[str, list[Sample]], name: str, field: str) -> Estimate | None:
    if name in (OURS, DIRECT) or OURS not in samples:
        return None
    pairs = list(zip(samples[OURS], samples[name], strict=False))
    return estimate(median_ratio, *([getattr(pair[at], field) for pair in pairs] for at in (0, 1)))
