"""`pdrelay bench validate`: the simulator beside the deployment that it simulates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from pdrelay.bench.answers import client
from pdrelay.bench.endpoint import Target, probe
from pdrelay.bench.load_metrics import Timing, timing
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.open_load import Pace
from pdrelay.bench.playing import Play
from pdrelay.bench.profile_deployment import Parts, connected, measure_instance, measure_lines
from pdrelay.bench.profile_file import fit
from pdrelay.bench.prompts import Scale
from pdrelay.bench.trio import Trio, running
from pdrelay.bench.validation import Metric, Times, calibrate, compare, measured, prepared, simulate
from pdrelay.cluster.config import Deployment, load
from pdrelay.cluster.topology import Instance
from pdrelay.errors import ConfigError, PdrelayError
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.profile import load as load_profile
from pdrelay.sim.deployed import Terms, deployed
from pdrelay.sim.scenario import Scenario
from pdrelay.workload.base import Request
from pdrelay.workload.choice import WorkloadTable, choose

BLOCK = 16
"""Tokens of the blocks in which the calibration's sessions share prefixes: those of the engines."""

CHUNK = 2048
"""vLLM's default of `max_num_batched_tokens`."""


class Settings(NamedTuple):
    """The options of the command."""

    emulated: bool = False
    config: Path | None = None  # a deployment that runs, instead of one started here ...
    url: str = ""  # ... and its gateway
    rate: str = "20mbit"
    rtt: str = "30ms"
    calibration: WorkloadTable = WorkloadTable()
    validation: WorkloadTable = WorkloadTable()
    base: Path = Path()  # of a trace's path
    requests: int = 24  # of each workload, later turns of their sessions not counted
    seed: int = 0
    length: float = 1.0  # factor on a trace's prompts
    speed: float = 1.0
    longest: int = 2048  # tokens up to which prefill is measured
    repetitions: int = 3


def sized(*, emulated: bool) -> tuple[WorkloadTable, WorkloadTable]:
    """Workloads of the calibration and the validation that suit the demo's engines: sessions that share most of their
    prompts, and single requests with skewed hit rates. The emulated model's KV is small, its prompts are longer."""
    if emulated:
        return (
            WorkloadTable(generator="agent", rate=1.0, prompt=600, output=40.0, longest=2000, block_tokens=BLOCK),
            WorkloadTable(generator="pdd", rate=1.5, prompt=1408, output=50.0),
        )
    return (
        WorkloadTable(generator="agent", rate=0.1, prompt=240, output=32.0, longest=720, block_tokens=BLOCK),
        WorkloadTable(generator="pdd", rate=0.2, prompt=560, output=40.0),
    )


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one instance, and how far its fit is off."""

    instance: str
    costs: dict[str, Any]
    errors: dict[str, float]


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "validate"
    command: str
    machine: Machine
    engine: str
    costs: list[Costs] = []
    line_rates: dict[str, float] = {}  # bytes/s
    terms: dict[str, float] = {}
    calibration: list[Metric] = []  # on the calibration's own requests; both real runs are the same one
    metrics: list[Metric] = []
    requests: int = 0
    runs: dict[str, list[Timing]] = {}
    simulated: dict[str, dict[str, float]] = {}  # by session and turn
    failures: dict[str, str] = {}


def new_report(command: str, settings: Settings) -> Report:
    """An empty report."""
    engine = "emulated" if settings.emulated else "vLLM on CPU, SmolLM2-135M-Instruct"
    return Report(command=command, machine=describe(), engine=str(settings.config or engine))


async def run(settings: Settings, report: Report, progress: Callable[[str], None]) -> None:
    """Fills `report`; what was measured before something failed is kept. Raises ConfigError."""
    try:
        async with AsyncExitStack() as stack:
            progress("starting the engines")
            trio = await _deployment(settings, stack)
            build = await _measured(trio.deployment, settings, report, progress)
            session = await stack.enter_async_context(client(trio.url))
            await _validate(session, build, settings, report, progress)
    except ConfigError:
        raise
    except PdrelayError as error:
        report.failures["run"] = str(error)
    broken = [metric.name for metric in report.metrics if not metric.holds]
    if broken:
        report.failures["validation"] = f"the simulator is off by more than the limit in {', '.join(broken)}"


async def _deployment(settings: Settings, stack: AsyncExitStack) -> Trio:
    if settings.config is not None:
        return Trio(settings.url, load(settings.config))
    options = ["--wan-rate", settings.rate, "--wan-rtt", settings.rtt, *(["--emulated"] if settings.emulated else [])]
    return await stack.enter_async_context(running(options))


# ---- what the simulator must know ----


@dataclass(frozen=True, slots=True)
class Build:
    """Makes scenarios of the deployment."""

    deployment: Deployment
    profiles: Mapping[str, InstanceProfile]
    rates: Mapping[tuple[str, str], float]

    def __call__(self, terms: Terms) -> Scenario:
        """The scenario with these terms."""
        return deployed(self.deployment, self.profiles, self.rates, terms)


async def _measured(
    deployment: Deployment, settings: Settings, report: Report, progress: Callable[[str], None]
) -> Build:
    profiles: dict[str, InstanceProfile] = {}
    async with connected(deployment, [instance.name for instance in deployment.instance], depots=True) as parts:
        for alike in _alike(deployment):
            profile = await _profile(parts, alike[0], settings, report, progress)
            profiles |= dict.fromkeys(alike, profile)
        progress("measuring lines")
        lines = {}
        try:
            lines = await measure_lines(parts, settings.longest, settings.repetitions)
        except PdrelayError as error:
            report.failures["lines"] = f"{error}; the configured rates are simulated"
    rates = {ends: max(line.rates) for ends, line in lines.items()}
    report.line_rates = {f"{source}->{target}": rate for (source, target), rate in rates.items()}
    return Build(deployment, profiles, rates)


def _alike(deployment: Deployment) -> list[list[str]]:
    """Instances that run the same engine in the same way: one of them is measured for all, one near the gateway."""
    groups: dict[str, list[Instance]] = {}
    for instance in deployment.instance:
        kind = (instance.engine, instance.device, instance.profile, instance.args, instance.env)
        groups.setdefault(repr(kind), []).append(instance)
    home = deployment.gateway.cluster
    return [
        [instance.name for instance in sorted(group, key=lambda each: each.cluster != home)]
        for group in groups.values()
    ]


async def _profile(
    parts: Parts, name: str, settings: Settings, report: Report, progress: Callable[[str], None]
) -> InstanceProfile:
    found = await measure_instance(
        parts, name, settings.longest, settings.repetitions, lambda step: progress(f"measuring {name}: {step}")
    )
    fitted = fit(found)
    costs = {kind: msgspec.to_builtins(getattr(fitted, kind)) for kind in ("prefill", "extend", "decode")}
    report.costs.append(Costs(instance=name, costs=costs, errors=fitted.errors))
    hello, size = found.hello, found.hello.contract.bytes_per_token
    # An engine whose load reports do not tell is taken to have room for all that it admits.
    tokens = found.kv_tokens or hello.max_num_seqs * hello.max_model_len
    return InstanceProfile(
        name=name, prefill=fitted.prefill, decode=fitted.decode, extend=fitted.extend, kv_per_token=size, kv_fixed=0.0,
        kv_capacity=tokens * size, max_num_seqs=hello.max_num_seqs,
        prefill_chunk=_chunk(parts.deployment, name), page_tokens=hello.contract.page_tokens,
    )  # fmt: skip


def _chunk(deployment: Deployment, name: str) -> int:
    instance = deployment.instance_named(name)
    return load_profile(Path(instance.profile)).limits.prefill_chunk if instance.profile else CHUNK


# ---- the runs ----


async def _validate(
    session: aiohttp.ClientSession, build: Build, settings: Settings, report: Report, progress: Callable[[str], None]
) -> None:
    target = await probe(session, "completions")
    calibration = _requests(settings.calibration, settings, settings.seed)
    requests = _requests(settings.validation, settings, settings.seed + 1)
    report.requests = sum(1 for request in requests for _ in request.turns())
    first = await _play(session, target, calibration, "calibration", settings, report, progress)
    sleeping = all(instance.engine == "emulated" for instance in build.deployment.instance)
    terms = calibrate(build, calibration, first, sleeping=sleeping)
    report.terms = terms._asdict()
    report.calibration = compare(first, first, simulate(build(terms), calibration))
    one = await _play(session, target, requests, "run 1", settings, report, progress)
    two = await _play(session, target, requests, "run 2", settings, report, progress)
    simulated = simulate(build(terms), requests)
    report.simulated = {f"{session}/{turn}": times for (session, turn), times in simulated.items()}
    report.metrics = compare(one, two, simulated)


def _requests(table: WorkloadTable, settings: Settings, seed: int) -> list[Request]:
    chosen = choose(table, settings.requests, seed, settings.base)
    scale = Scale(settings.length if table.trace else 1.0)
    scaled = (scale.apply(request) for request in itertools.islice(chosen.requests, chosen.number))
    return prepared(scaled, BLOCK)


async def _play(
    session: aiohttp.ClientSession, target: Target, requests: Sequence[Request], name: str, settings: Settings,
    report: Report, progress: Callable[[str], None],
) -> Times:  # fmt: skip
    """Plays with prompts of its own, so that nothing of it is in a cache before."""
    play = Play(
        session, target, 1000 * settings.seed + len(report.runs), Pace(settings.speed), {},
        lambda ended, failed: progress(f"{name}: {ended} ended, {failed} failed"),
    )  # fmt: skip
    await play.run(requests)
    timings = [timing(sent, play.load.started) for sent in play.ended]
    report.runs[name] = timings
    failed = [each.error for each in timings if each.error]
    if failed:
        report.failures[name] = f"{len(failed)} of {len(timings)} requests failed: {failed[0]}"
    return measured(timings)
