"""Measures a running engine through the session protocol: prefill, extend and decode, each several times.

Every prompt is new, so no cache answers. What the way to the engine takes is known from the engine's own durations and
taken off: it belongs to a deployment, not to an engine. Other load on the engine is measured along with it: profile an
idle one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pdrelay.engine.base import Engine, EngineSession, SessionEvent
from pdrelay.engine.messages import Extended, Failed, Hello, Open, Opened, Sampling, Tokens
from pdrelay.errors import BenchError, ConfigError
from pdrelay.perf.fit import Sample

OnStep = Callable[[str], None]
LOAD_WAIT = 3.0
"""Seconds in which an engine reports its load."""


class Plan(NamedTuple):
    """What is measured; lengths in tokens."""

    prompts: tuple[int, ...] = (16, 128, 512, 1024, 2048, 4096)
    extends: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (128, 1024)
    batches: tuple[int, ...] = (1, 2, 4)
    steps: int = 24  # decode steps of one measurement
    repetitions: int = 5
    first_id: int = 1000  # prompts are random token ids from here ...
    last_id: int = 40_000  # ... to here
    remote: bool = True  # there is a way to the engine


class Measured(NamedTuple):
    """Samples of one engine."""

    hello: Hello
    prefill: list[Sample]
    extend: list[Sample]
    decode: list[Sample]
    kv_tokens: int  # that its KV memory holds; 0 when its load reports did not tell
    round_trip: float = 0.0  # seconds of the way to the engine and back, not contained in the samples


async def measure(
    engine: Engine, plan: Plan, on_step: OnStep = lambda _text: None, now: Callable[[], float] = time.perf_counter
) -> Measured:
    """Measures everything. Raises ConfigError when the engine is not there or too small, BenchError when it fails."""
    hello = engine.status.hello
    if hello is None:
        raise ConfigError(f"profile: engine {engine.instance} does not answer: {engine.status.detail}")
    run = _Run(engine, plan, now)
    longest = hello.max_model_len - plan.repetitions * max(plan.steps, *plan.extends) - 2
    prompts = [length for length in plan.prompts if length <= longest]
    contexts = [length for length in plan.contexts if length <= longest]
    batches = [batch for batch in plan.batches if batch <= hello.max_num_seqs]
    if len(prompts) < 2 or not contexts:
        raise ConfigError(f"profile: found a context of {hello.max_model_len} tokens, expected room for {plan.prompts}")
    await run.prefill(prompts[0])  # the first one warms kernels up
    prefill, extend, decode = [], [], []
    for length in prompts:
        on_step(f"prefill of {length}")
        prefill.append(Sample(length, 0, tuple([await run.prefill(length) for _ in range(plan.repetitions)])))
    for context in contexts:
        for tokens in plan.extends:
            on_step(f"extend of {tokens} behind {context}")
            behind = context + tokens * (plan.repetitions - 1) // 2  # on average: each goes behind the one before
            extend.append(Sample(tokens, behind, tuple(await run.extend(context, tokens))))
        for batch in batches:
            on_step(f"decode of {batch} behind {context}")
            behind = batch * (context + plan.steps * plan.repetitions // 2)
            decode.append(Sample(batch, behind, tuple(await run.decode(context, batch))))
    way = run.round_trip if plan.remote else 0.0
    return Measured(
        hello, [_without(s, way) for s in prefill], [_without(s, way) for s in extend], decode, run.kv_tokens, way
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _without(sample: Sample, seconds: float) -> Sample:
    return sample._replace(seconds=tuple(max(each - seconds, each / 10) for each in sample.seconds))


class _Run:
    """Sessions on one engine."""

    def __init__(self, engine: Engine, plan: Plan, now: Callable[[], float]) -> None:
        self._engine, self._plan, self._now = engine, plan, now
        self._random = random.Random(time.time_ns())  # noqa: S311 - prompts that nobody has sent before
        self._number = 0
        self.kv_tokens = self._most_tokens = 0
        self._ways: list[float] = []  # round trips

    @property
    def round_trip(self) -> float:
        """Seconds of the quickest way to the engine and back."""
        return min(self._ways, default=0.0)

    async def prefill(self, tokens: int) -> float:
        """Seconds from sending a prompt to its first token."""
        began = self._now()
        session = self._open("prefill", tokens, 1)
        try:
            await _until(session, Tokens)
            return self._now() - began
        finally:
            session.abort()

    async def extend(self, context: int, tokens: int) -> list[float]:
        """Seconds of each extend of one session, one behind the other."""
        asked = self._now()
        session = self._open("decode", context, tokens * self._plan.repetitions + 2)
        try:
            opened = await _until(session, Opened)
            self._ways.append(max(0.0, self._now() - asked - opened.ready))
            return [await self._extended(session, tokens) for _ in range(self._plan.repetitions)]
        finally:
            session.abort()

    async def _extended(self, session: EngineSession, tokens: int) -> float:
        began = self._now()
        session.extend(self._ids(tokens))
        await _until(session, Extended)
        return self._now() - began

    async def decode(self, context: int, batch: int) -> list[float]:
        """Seconds of a step while `batch` sequences decode: the median gap of each repetition, so many steps of all."""
        steps = self._plan.steps * self._plan.repetitions
        sessions = [self._open("decode", context, steps + 1) for _ in range(batch)]
        try:
            for session in sessions:
                await _until(session, Opened)
            await self._learn_capacity(batch * context)
            for session in sessions:
                session.takeover(self._ids(1))
            arrivals = await asyncio.gather(*(self._arrivals(session) for session in sessions))
        finally:
            for session in sessions:
                session.abort()
        together = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        pairs = sorted(
            (a, b) for times in arrivals for a, b in pairwise(times) if together[0] <= a and b <= together[1]
        )
        gaps = [b - a for a, b in pairs]
        share = len(gaps) // self._plan.repetitions
        if not share:
            raise BenchError(f"profile: {self._engine.instance} decoded its {batch} sequences one after the other")
        return [_median(gaps[part * share : (part + 1) * share]) for part in range(self._plan.repetitions)]

    async def _arrivals(self, session: EngineSession) -> Sequence[float]:
        times: list[float] = []
        async for event in session.events():
            if isinstance(event, Failed):
                raise BenchError(f"profile: the engine failed: {event.message}")
            if isinstance(event, Tokens):
                times.append(self._now())
        return times

    async def _learn_capacity(self, tokens: int) -> None:
        """What `tokens` take of the KV memory says how many it holds; the most tokens say it best."""
        if tokens <= self._most_tokens:
            return
        self._most_tokens = tokens
        deadline = time.monotonic() + LOAD_WAIT
        before = self._engine.status.load
        while time.monotonic() < deadline:
            load = self._engine.status.load
            if load is not None and load is not before and load.kv_usage > 0:
                self.kv_tokens = int(tokens / load.kv_usage)
                return
            await asyncio.sleep(0.05)

    def _open(self, mode: str, tokens: int, most: int) -> EngineSession:
        self._number += 1
        sampling = Sampling(max_tokens=most + 1, temperature=0.0, ignore_eos=True)
        sid = f"profile/{self._number}"
        kind = "prefill" if mode == "prefill" else "decode"
        return self._engine.open(Open(sid=sid, mode=kind, prompt=self._ids(tokens), sampling=sampling))  # type: ignore[arg-type]

    def _ids(self, count: int) -> list[int]:
        plan = self._plan
        return [self._random.randint(plan.first_id, plan.last_id) for _ in range(count)]


Event = TypeVar("Event", bound=SessionEvent)


async def _until(session: EngineSession, kind: type[Event]) -> Event:
    async for event in session.events():
        if isinstance(event, Failed):
            raise BenchError(f"profile: the engine failed: {event.message}")
        if isinstance(event, kind):
            return event
    raise BenchError("profile: the engine ended a session too early")
