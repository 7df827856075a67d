"""Modelled time: what the step loop makes of the profile's equations."""

from __future__ import annotations

import asyncio

import pytest

from pdrelay.engine.emulated.kv_memory import KvMemory
from pdrelay.engine.emulated.steps import ScaledClock, StepLoop
from pdrelay.perf.equations import decode_step_seconds, extend_seconds, prefill_seconds
from pdrelay.perf.profile import load, shipped

PROFILE = load(shipped("smollm2-135m-cpu"))


class CountingClock:
    """Time passes at once and is added up."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def counter(tokens: int):
    left = [tokens]

    def advance() -> bool:
        left[0] -= 1
        return left[0] > 0

    return advance


async def test_a_chunked_prefill_takes_as_long_as_its_equation() -> None:
    clock = CountingClock()
    slices: list[tuple[int, int, int]] = []
    await StepLoop(PROFILE, clock).prefill(1300, 64, lambda *slice_: slices.append(slice_))
    assert clock.now == pytest.approx(prefill_seconds(PROFILE.prefill, 1300, 64))
    for done in (512, 1024, 1300):  # every chunk passes all layers, in order
        layers = [layer for d, first, last in slices if d == done for layer in range(first, last)]
        assert layers == list(range(30))


async def test_extension_and_decoding_take_as_long_as_their_equations() -> None:
    clock = CountingClock()
    loop = StepLoop(PROFILE, clock)
    await loop.extend(20, 300)
    assert clock.now == pytest.approx(extend_seconds(PROFILE.extend, 20, 300))
    clock.now = 0.0
    await asyncio.gather(*(loop.decode(100, counter(5)) for _ in range(4)))
    assert clock.now == pytest.approx(sum(decode_step_seconds(PROFILE.decode, 4, 400 + 4 * n) for n in range(5)))


async def test_decoding_goes_on_between_the_chunks_of_a_prefill() -> None:
    clock = CountingClock()
    loop = StepLoop(PROFILE, clock)
    times: list[float] = []
    more = counter(100)

    def advance() -> bool:
        times.append(clock.now)
        return more()

    decoding = asyncio.create_task(loop.decode(10, advance))
    await loop.prefill(2000, 0, lambda *_: None)
    during = len(times)
    await decoding
    assert during >= 4  # one token a chunk


async def test_an_error_ends_its_own_sequence_only() -> None:
    loop = StepLoop(PROFILE, CountingClock())

    def fail() -> bool:
        raise RuntimeError("boom")

    failed, fine = await asyncio.gather(loop.decode(1, fail), loop.decode(1, counter(3)), return_exceptions=True)
    assert isinstance(failed, RuntimeError)
    assert fine is None


async def test_scaled_clock_keeps_its_rate_however_long_the_loop_oversleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def oversleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.002

    monkeypatch.setattr("pdrelay.engine.emulated.steps.time.perf_counter", lambda: now)
    monkeypatch.setattr("pdrelay.engine.emulated.steps.asyncio.sleep", oversleep)
    clock = ScaledClock(0.1)
    for _ in range(100):
        await clock.sleep(0.03)
    assert now == pytest.approx(100 * 0.003, abs=0.003)


async def test_scaled_clock_takes_work_between_sleeps_as_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("pdrelay.engine.emulated.steps.time.perf_counter", lambda: now)
    monkeypatch.setattr("pdrelay.engine.emulated.steps.asyncio.sleep", sleep)
    clock = ScaledClock(0.1)

    async def steps(count: int) -> None:
        nonlocal now
        for _ in range(count):
            await clock.sleep(0.03)
            now += 0.001

    await asyncio.create_task(steps(100))
    assert now == pytest.approx(100 * 0.003, abs=0.003)
    now += 5.0  # idle: no later step is shorter for it
    before = now
    await asyncio.create_task(steps(1))
    assert now - before == pytest.approx(0.003 + 0.001)


async def test_admission_is_first_come_first_served() -> None:
    memory = KvMemory(10, 8, lambda *_: None)
    first = await memory.admit(8)
    large, small = asyncio.create_task(memory.admit(5)), asyncio.create_task(memory.admit(1))
    await asyncio.sleep(0)
    assert (memory.running, memory.waiting, memory.usage) == (1, 2, 0.8)  # the small one does not overtake
    large.cancel()
    claim = await small
    await asyncio.gather(large, return_exceptions=True)
    for held in (first, claim):
        memory.release(held)
    assert (memory.running, memory.waiting, memory.usage) == (0, 0, 0)


async def test_unused_pages_stay_until_room_is_needed() -> None:
    held: dict[str, None] = {}

    def on_held(added, removed):
        held.update(dict.fromkeys(added))
        for name in removed:
            del held[name]

    memory = KvMemory(4, 8, on_held)
    for name in ("a", "b", "c"):
        claim = await memory.admit(1)
        memory.store(claim, name, b"")
        memory.release(claim)
    claim = await memory.admit(2)
    assert memory.use_cached(claim, ["b", "x"]) == [b""]
    other = await memory.admit(2)
    assert list(held) == ["b"]  # used pages never go
    memory.release(other)
    memory.release(claim)
