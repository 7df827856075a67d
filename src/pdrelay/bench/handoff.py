"""`pdrelay bench handoff`: what the switch from relay to main decode costs, and whether a reader sees it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
import msgspec

from pdrelay.bench import incremental
from pdrelay.bench.incremental import Cost
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.seam import Seams, seams
from pdrelay.bench.streams import Stream, fresh_prompt, stream
from pdrelay.bench.trio import Trio, running
from pdrelay.cluster.units import parse_time
from pdrelay.errors import PdrelayError

Mode = Literal["one_shot", "catch_up"]
MODES: tuple[Mode, ...] = ("one_shot", "catch_up")
SIZES = (10, 50, 100, 200, 400)

PUBLISHED = (
    "Published (PDD, Table 5, 100 tokens): KV over Ethernet mean 185.4 ms, max 512.6, deviation 96.3; token ids and "
    "recompute mean 305.2, max 321.4, deviation 4.8, payload about 1.5 KB."
)

EMULATED_VOCABULARY = 256
EMULATED_PROMPTS = 500, 1500
"""The emulated model's KV is small: these take as long on the line as the real one's."""


class Settings(NamedTuple):
    """The options of the command."""

    parts: Sequence[str] = ("incremental", "seams")
    modes: Sequence[Mode] = MODES
    handoffs: int = 24  # a mode
    at_once: int = 4
    prompt_tokens: tuple[int, int] = (80, 240)
    output_tokens: int = 128
    rounds: int = 7
    sizes: Sequence[int] = SIZES
    rate: str = "20mbit"
    rtt: str = "30ms"
    step_time: float = 0.0  # seconds that a step of vLLM takes at least
    emulated: bool = False


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "handoff"
    machine: Machine
    command: str
    engine: str
    line: str
    published: str = PUBLISHED
    costs: list[Cost] = []
    seams: list[Seams] = []
    failures: dict[str, str] = {}


def new_report(command: str, settings: Settings) -> Report:
    """An empty report."""
    engine = "emulated" if settings.emulated else "vLLM on CPU, SmolLM2-135M-Instruct"
    if settings.step_time:
        engine += f", steps of at least {settings.step_time * 1e3:g}ms"
    return Report(
        machine=describe(), command=command, engine=engine, line=f"{settings.rate}, round trip {settings.rtt}"
    )


async def run(settings: Settings, report: Report, progress: Callable[[str], None]) -> None:
    """Fills `report`; what one part cannot do does not lose the others."""
    options = ["--wan-rate", settings.rate, "--wan-rtt", settings.rtt, "--step-time", f"{settings.step_time}s"]
    options += ["--emulated"] if settings.emulated else []
    with _reported(report, "deployment"):
        progress("starting the engines")
        async with running(options) as trio:
            vocabulary = _vocabulary(Path(trio.deployment.model.path))
            if "incremental" in settings.parts:
                with _reported(report, "incremental"):
                    report.costs = await incremental.measure(
                        trio, settings.sizes, settings.rounds, vocabulary, progress
                    )
            if "seams" in settings.parts:
                with _reported(report, "seams"):
                    await _seams(trio, settings, vocabulary, report, progress)


async def _seams(
    trio: Trio, settings: Settings, vocabulary: int, report: Report, progress: Callable[[str], None]
) -> None:
    """The same prompts lengths in both modes; every request is cold, relayed and handed over when its KV is there."""
    for mode in settings.modes:
        streams, lost = await _streams(trio, settings, vocabulary, mode, progress)
        if lost:
            report.failures[f"seams {mode}"] = f"{len(lost)} of {settings.handoffs} requests, the first: {lost[0]}"
        if (found := seams(mode, streams, parse_time(settings.rtt))) is not None:
            report.seams.append(found)
        elif not lost:
            report.failures[f"seams {mode}"] = "no request was handed over far enough from its ends: use longer outputs"


async def _streams(
    trio: Trio, settings: Settings, vocabulary: int, mode: Mode, progress: Callable[[str], None]
) -> tuple[list[Stream], list[str]]:
    """The streams, and why others failed."""
    rng = random.Random(mode)  # noqa: S311 - not for secrets
    lengths = random.Random(7)  # noqa: S311 - the same for all modes
    prompts = [
        fresh_prompt(rng, lengths.randint(*settings.prompt_tokens), vocabulary) for _ in range(settings.handoffs)
    ]
    done: list[Stream] = []
    lost: list[str] = []
    waiting = iter(prompts)

    async def worker(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            extension = {"pipeline": "p_rld_md", "handoff_mode": mode}
            try:
                done.append(await stream(client, trio.deployment.model.name, prompt, settings.output_tokens, extension))
            except (PdrelayError, httpx.HTTPError) as error:
                lost.append(str(error) or type(error).__name__)
            progress(f"{mode}: {len(done)} of {settings.handoffs} handoffs")

    async with httpx.AsyncClient(base_url=trio.url) as client, asyncio.TaskGroup() as group:
        for _ in range(settings.at_once):
            group.create_task(worker(client))
    return done, lost


@contextmanager
def _reported(report: Report, part: str) -> Iterator[None]:
    try:
        yield
    except* (PdrelayError, httpx.HTTPError, TimeoutError) as errors:
        report.failures[part] = "; ".join(_texts(errors))


def _texts(errors: BaseExceptionGroup[Any]) -> Iterator[str]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _texts(error)
        else:
            yield str(error) or type(error).__name__


def _vocabulary(model: Path) -> int:
    """Token ids below this are the model's; that of the demo's emulated engines has no config file."""
    try:
        size = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
    except (OSError, KeyError):
        return EMULATED_VOCABULARY
    return int(size)
