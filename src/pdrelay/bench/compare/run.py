"""Plays the comparison, policy after policy, and keeps what each showed."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdrelay.bench.children import started
from pdrelay.bench.compare import site
from pdrelay.bench.compare.experiment import BASELINE, BEST, OURS, POLICY_FILE, STOCK, Experiment, write_profiles
from pdrelay.bench.compare.player import READY_SECONDS, Job, Planned, Played
from pdrelay.bench.compare.rows import Row, figures, played
from pdrelay.bench.compare.simulate import simulate
from pdrelay.bench.line import ShapedLine, opened
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.stats import Estimate, estimate, percentile_ratio
from pdrelay.depot.control_client import control_over_unix
from pdrelay.errors import BenchError, PdrelayError
from pdrelay.workload.base import Request

BLOCK = 10
"""Neighbouring requests that are resampled together: those that meet on the line fare alike."""
SILENCE = 300.0
"""Real seconds without any request ending after which a run has failed."""

Progress = Callable[[str], None]


class Where(NamedTuple):
    """A deployment that runs: its URL, whence it is reached, and who counts the bytes that prefill's side sent."""

    url: str
    namespace: str | None
    sent: Callable[[], Awaitable[int]]


Place = AbstractAsyncContextManager[Where]


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured. Times are the evaluation's."""

    bench: str = "compare"
    engines: str = "emulated"
    machine: Machine
    command: str
    setup: dict[str, Any] = {}
    policies: dict[str, dict[str, Any]] = {}
    simulated: dict[str, dict[str, Any]] = {}
    comparisons: dict[str, Estimate] = {}
    failures: dict[str, str] = {}
    rows: dict[str, list[Row]] = {}
    simulated_rows: dict[str, list[Row]] = {}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without the single requests."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in found.items() if key not in ("rows", "simulated_rows")}


def new_report(command: str) -> Report:
    """An empty report."""
    return Report(machine=describe(), command=command)


async def run(experiment: Experiment, report: Report, model: Path, profile: Path, progress: Progress) -> None:
    """Fills `report`. `model` has a tokenizer, `profile` its vocabulary. What one policy cannot do loses no other's."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-bench-") as name:
        home = Path(name)
        profiles = write_profiles(experiment, home, profile)
        line_rate = experiment.real_line_rate / experiment.speed
        for policy in experiment.policies:
            rows = simulate(experiment, policy, profiles, site.ARENA)
            report.simulated_rows[policy], report.simulated[policy] = rows, figures(rows, line_rate)
        rate, rtt = experiment.real_line_rate, experiment.rtt / experiment.speed
        try:
            async with opened(experiment.line, rate, rtt, home) as line:
                report.setup = describe_setup(experiment, line)
                fleet = site.Fleet(home, model, profiles)
                for policy in experiment.policies:
                    place = _emulated(fleet, line, policy)
                    job = partial(_job, experiment, policy)
                    await one(report, policy, place, job, home, experiment.speed, line_rate, progress)
        except BenchError as error:
            report.failures["line"] = str(error)
        finally:
            conclude(report)


def _job(experiment: Experiment, policy: str, url: str) -> Job:
    return job_of(experiment.trace(), url, policy, experiment.speed, experiment.seed, site.MODEL)


def describe_setup(experiment: Experiment, line: ShapedLine) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    return {
        "requests": experiment.requests,
        "seed": experiment.seed,
        "speed": experiment.speed,
        "length_factor": 1 / 16,
        "prompt_tokens": experiment.prompt,
        "requests_per_s": experiment.rate,
        "output_mean": experiment.output,
        "line": line.kind,
        "line_note": line.note,
        "line_load": experiment.line_load,
        "line_rate_here_mbit": experiment.real_line_rate * 8 / 1e6,
        "line_rate_modelled_mbit": experiment.modelled_line_rate * 8 / 1e6,
        "rtt_s": experiment.rtt,
        "instances": "2 prefill, 1 relay, 1 main decode",
    }


@asynccontextmanager
async def _emulated(fleet: site.Fleet, line: ShapedLine, policy: str) -> AsyncIterator[Where]:
    name, handoff = POLICY_FILE[policy]
    async with site.running(fleet, line, name, handoff, policy) as running:
        yield Where(running.url, running.namespace, partial(sent_by, running.near_depot))


async def one(
    report: Report, policy: str, place: Place, job: Callable[[str], Job], home: Path, speed: float, line_rate: float,
    progress: Progress,
) -> None:  # fmt: skip
    """One policy: starts its deployment, plays, stops it. `line_rate` in bytes of an evaluation's second."""
    rows: list[Row] = []
    expected, sent = 0, None
    try:
        progress(f"{policy}: starting")
        async with place as where:
            orders = job(where.url)
            expected = len(orders.requests)
            sent = await play(orders, where, home, speed, rows, lambda news: progress(f"{policy}: {news}"))
    except PdrelayError as error:
        report.failures[policy] = f"{error} (after {len(rows)} of {expected} requests)"
    finally:
        rows.sort(key=lambda row: row.number)
        if rows:
            report.rows[policy] = rows
            report.policies[policy] = figures(rows, line_rate, sent)
        errors = sorted({row.error for row in rows if row.error})
        if errors:
            failed = sum(1 for row in rows if row.error)
            report.failures.setdefault(policy, f"{failed} requests failed: {'; '.join(errors[:3])}")


async def play(orders: Job, where: Where, home: Path, speed: float, rows: list[Row], progress: Progress) -> int | None:
    """Plays the requests on a deployment that starts or runs; `rows` get what ended.

    Returns the bytes that prefill's side sent meanwhile. Raises BenchError, DepotUnavailableError.
    """
    async with started("player", "pdrelay.bench.compare.player", [], home, where.namespace) as player:
        await player.tell(msgspec.json.encode(orders).decode())
        if (first := await player.line(READY_SECONDS + SILENCE)) != "ready":
            raise BenchError(f"player: {first}")
        before = await where.sent()
        while line_of := await player.line(SILENCE):
            rows.append(played(msgspec.json.decode(line_of, type=Played), speed))
            progress(f"{len(rows)} of {len(orders.requests)} requests ended")
        return await where.sent() - before


async def sent_by(depot: Path) -> int:
    """Bytes of KV that the depot with this socket has sent. Raises DepotUnavailableError."""
    control = control_over_unix(str(depot))
    try:
        await control.ready(READY_SECONDS)
        return (await control.stats()).sent_bytes
    finally:
        await control.aclose()


def job_of(trace: Sequence[Request], url: str, policy: str, speed: float, seed: int, model: str) -> Job:
    """The player's orders for a policy of POLICY_FILE."""
    requests = [Planned(request.arrival / speed, request.prompt, request.output, request.cached) for request in trace]
    # A relay would end a short request before the common prefix is at main decode.
    name, _ = POLICY_FILE[policy]
    return Job(
        url=url, model=model, requests=requests, warm=max(request.cached for request in trace),
        warm_extension={"pipeline": "p_md"} if name == "pdd" else {}, extension={"trace": True}, seed=seed,
    )  # fmt: skip


# ---- what follows from the rows ----


def conclude(report: Report) -> None:
    """Ratios of our policy to the baselines, over requests that both completed, and of played to simulated."""
    found: dict[str, Estimate] = {}
    ours = report.rows.get(OURS, [])
    for q in (50, 90, 99):
        for other in (BASELINE, BEST, STOCK):
            if pair := _pairs(ours, report.rows.get(other, []), "ttst"):
                found[f"p{q}_ttst_{OURS}_over_{other}"] = estimate(percentile_ratio(q), *pair, block=BLOCK)
    for policy, rows in report.rows.items():
        for name in ("ttst", "ttft"):
            if pair := _pairs(rows, report.simulated_rows.get(policy, []), name):
                found[f"p90_{name}_{policy}_played_over_simulated"] = estimate(percentile_ratio(90), *pair, block=BLOCK)
    report.comparisons = found


def _pairs(left: list[Row], right: list[Row], name: str) -> tuple[list[float], list[float]] | None:
    """The same requests in both; None when there are too few."""
    others = {row.number: getattr(row, name) for row in right if not row.error}
    pairs = [
        (value, others[row.number])
        for row in left
        if not row.error and row.number in others
        and (value := getattr(row, name)) == value and others[row.number] == others[row.number]
    ]  # fmt: skip
    return ([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) >= BLOCK else None
