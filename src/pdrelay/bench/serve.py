"""`pdrelay bench serve`: an open load on any OpenAI endpoint."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from pdrelay.bench.answers import client, now
from pdrelay.bench.endpoint import Kind, Target, probe
from pdrelay.bench.load_metrics import Goals, Timing, figures, per_request, timing, values
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.open_load import OpenLoad, Pace, Sent
from pdrelay.bench.playing import Play
from pdrelay.bench.prompts import Scale
from pdrelay.errors import ConfigError, PdrelayError
from pdrelay.workload.base import Request
from pdrelay.workload.choice import Load, WorkloadTable, choose

LATE = 0.05
"""Seconds of lag at the 99th percentile from which on a result says that the generator was late."""
MARGIN = 64
"""Tokens of the model's context that automatic scaling leaves for chat templates."""
KEPT_COMPLAINTS = 5


class Settings(NamedTuple):
    """The options of the command, checked."""

    url: str
    kind: Kind = "chat"
    model: str = ""
    api_key: str = ""
    workload: WorkloadTable = WorkloadTable()
    base: Path = Path()  # of the trace's path
    requests: int = 100  # 0: all of a trace
    seed: int = 0
    skip_bad: bool = False
    pace: Pace = Pace()
    length: float = 0.0  # factor on prompts; 0: what the model's context asks for
    output: float = 1.0  # factor on outputs
    goals: Goals = Goals()
    words: bool = False  # prompts are text although token ids could be sent
    extra: Mapping[str, Any] = {}  # further parameters of every request


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    command: str
    machine: Machine
    model: str = ""
    endpoint: str = ""
    workload: dict[str, Any] = {}  # what was played, and how it was scaled
    timings: list[Timing] = []
    result: dict[str, Any] = {}  # the keys of `vllm bench serve`, and ours
    notes: list[str] = []
    failures: dict[str, str] = {}

    def as_dict(self, *, detailed: bool) -> dict[str, Any]:
        """For JSON; `detailed` adds the lists with an element for each request."""
        named: dict[str, Any] = {
            "bench": "serve",
            "date": self.machine.date,
            "backend": "openai",
            "endpoint_type": self.endpoint,
        }
        named |= {"model_id": self.model, "num_prompts": len(self.timings), **self.result}
        lists = per_request(self.timings) if detailed else {}
        rest = {"workload": self.workload, "machine": msgspec.to_builtins(self.machine), "command": self.command}
        return {**named, **rest, "notes": self.notes, "failures": self.failures, **lists}


def new_report(command: str) -> Report:
    """An empty report."""
    return Report(command=command, machine=describe())


async def run(settings: Settings, report: Report, progress: Callable[[str], None]) -> None:
    """Fills `report`; whatever fails or interrupts it, what was measured is kept. Raises ConfigError."""
    chosen = choose(settings.workload, settings.requests, settings.seed, settings.base, skip_bad=settings.skip_bad)
    plain = list(itertools.islice(chosen.requests, chosen.number))
    with _reported(report, "endpoint"):
        async with client(settings.url, settings.api_key) as session:
            progress("asking the endpoint what it takes")
            target = await probe(session, settings.kind, settings.model, words=settings.words)
            report.model, report.endpoint = target.model, target.path
            scale = await _scale(session, settings, plain)
            requests = [scale.apply(request) for request in plain]
            report.workload = _described(settings, scale, plain, target)
            report.notes += _warnings(chosen, target)
            await _play(session, target, settings, requests, report, progress)


async def _play(
    session: aiohttp.ClientSession, target: Target, settings: Settings, requests: Sequence[Request], report: Report,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    total = sum(1 for first in requests for _ in first.turns())

    def on_end(ended: int, failed: int) -> None:
        progress(f"{ended} of {total} ended ({failed} failed), {play.load.running} under way")

    progress("warming up")
    play = Play(session, target, settings.seed, settings.pace, settings.extra, on_end)
    try:
        await play.run(requests)
    finally:
        _conclude(report, play.load, play.ended, total, settings.goals)


def _conclude(report: Report, load: OpenLoad, ended: Sequence[Sent], total: int, goals: Goals) -> None:
    """Takes down what has ended, in the order in which it was due."""
    started = load.started or now()
    report.timings = sorted((timing(sent, started) for sent in ended), key=lambda each: each.due)
    duration = max((sent.answer.ended for sent in ended), default=started) - started
    report.result = figures(report.timings, duration, goals) | {
        "max_concurrent_requests": load.most_running,
        "not_due": total - len(ended),
    }
    errors = Counter(each.error for each in report.timings if each.error)
    if errors:
        told = "; ".join(f"{error} ({count})" for error, count in errors.most_common(KEPT_COMPLAINTS))
        report.failures["requests"] = f"{sum(errors.values())} of {len(ended)} failed: {told}"
    if load.skipped:
        report.notes.append(f"{load.skipped} turns were not sent, because a turn before them failed")
    if report.result["p99_lag_ms"] > LATE * 1e3:
        report.notes.append(
            f"the generator was late by {report.result['p99_lag_ms']:.0f} ms at the 99th percentile (most "
            f"{max(values(report.timings, 'lag')) * 1e3:.0f} ms): latencies contain that, the server may be faster"
        )


async def _scale(session: aiohttp.ClientSession, settings: Settings, requests: Sequence[Request]) -> Scale:
    """The factors asked for, or else on prompts what makes the longest request fit into the model's context."""
    if settings.length:
        return Scale(settings.length, settings.output)
    turns = [turn for request in requests for turn in request.turns()]
    output = max(round(turn.output * settings.output) for turn in turns)
    room = await _context(session) - output - MARGIN
    longest = max(turn.prompt for turn in turns)
    if room < 1:
        raise ConfigError(f"--output-factor: found outputs of {output} tokens, expected ones that fit into the context")
    return Scale(min(1.0, room / longest), settings.output)


async def _context(session: aiohttp.ClientSession) -> int:
    """Tokens of the model's context; endless when the endpoint does not say."""
    try:
        async with session.get("/v1/models") as response:
            return int(msgspec.json.decode(await response.read())["data"][0]["max_model_len"])
    except (aiohttp.ClientError, msgspec.DecodeError, LookupError, TypeError, ValueError):
        return 1 << 40


def _described(settings: Settings, scale: Scale, plain: Sequence[Request], target: Target) -> dict[str, Any]:
    """What is played, and what was changed of it."""
    table, turns = settings.workload, [turn for request in plain for turn in request.turns()]
    source = {"trace": Path(table.trace).name} if table.trace else {"generator": table.generator, "rate": table.rate}
    blocks = max((turn.block_tokens for turn in turns if turn.blocks), default=0)
    return {
        **source,
        "requests": len(turns),
        "sessions": len({turn.session for turn in turns if turn.session}),
        "seed": settings.seed,
        "speed": settings.pace.speed,
        "max_concurrency": settings.pace.at_once or None,
        "length_factor": scale.exact(blocks) if blocks else scale.length,
        "output_factor": scale.output,
        "block_tokens": round(blocks * scale.exact(blocks)) if blocks else 0,
        "template_tokens": target.overhead,
        "prompts": "words" if isinstance(target.alphabet[0], str) else "token ids",
    }


def _warnings(chosen: Load, target: Target) -> list[str]:
    notes = []
    if chosen.skipped:
        notes.append(f"{chosen.skipped} rows of the trace were left out: {'; '.join(chosen.complaints)}")
    if not target.exact_lengths:
        notes.append("the endpoint does not take ignore_eos: answers may be shorter than the trace's")
    return notes


@contextmanager
def _reported(report: Report, part: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except PdrelayError as error:
        report.failures[part] = str(error)
