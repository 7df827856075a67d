"""The simulated engine against a plain loop over single steps, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.perf.instance import InstanceProfile, from_profile
from pdrelay.perf.profile import load, shipped
from pdrelay.sim.engine import Engine
from pdrelay.sim.events import Events
from pdrelay.sim.steps import steps_seconds, steps_within
from pdrelay.sim.work import Forward, Sequence

TINY = from_profile(load(shipped("tiny-emulated")))


@given(first=st.floats(1e-4, 1.0), growth=st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), count=st.integers(0, 100_000))
def test_steps_within_inverts_their_time(first: float, growth: float, count: int) -> None:
    seconds = steps_seconds(first, growth, count)
    assert steps_within(first, growth, seconds) == count
    assert steps_within(first, growth, seconds + first / 2) == count


class Job:
    """A sequence with its times."""

    def __init__(self, events: Events, context: int, tokens: int) -> None:
        self.end = -1.0
        self.sequence = Sequence(context, tokens, lambda: self._ended(events))

    def _ended(self, events: Events) -> None:
        assert self.end < 0
        self.end = events.now


def plain(profile: InstanceProfile, jobs: list[tuple[float, int, int]]) -> list[tuple[float, float, float]]:
    """First token, end and longest step of each job, one step after the other."""
    now, running = 0.0, dict[int, list[float]]()
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    out: dict[int, list[float]] = {}
    while waiting or running:
        if not running:
            now = max(now, jobs[waiting[0]][0])
        while waiting and jobs[waiting[0]][0] <= now + 1e-12:
            index = waiting.pop(0)
            running[index] = [jobs[index][1], jobs[index][2]]
            out[index] = [-1.0, -1.0, 0.0]
        step = profile.decode_step_seconds(len(running), sum(c for c, _ in running.values()))
        now += step
        for index in list(running):
            out[index][0] = now if out[index][0] < 0 else out[index][0]
            out[index][2] = max(out[index][2], step)
            running[index][0] += 1
            running[index][1] -= 1
            if not running[index][1]:
                out[index][1] = now
                del running[index]
    return [(out[i][0], out[i][1], out[i][2]) for i in range(len(jobs))]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5000), st.integers(1, 300)), min_size=1, max_size=12))
def test_decoding_in_closed_form_is_decoding_step_by_step(jobs: list[tuple[float, int, int]]) -> None:
    jobs = [(round(moment, 3) + 1e-4 * i, context, tokens) for i, (moment, context, tokens) in enumerate(jobs)]
    events = Events()
    engine = Engine(events, replace(TINY, kv_capacity=1e12))
    runs = [Job(events, context, tokens) for _, context, tokens in jobs]
    for (moment, _, _), run in zip(jobs, runs, strict=True):
        events.at(moment, lambda run=run: engine.decode(run.sequence))  # type: ignore[misc]
    events.run()
    for run, (first, end, longest) in zip(runs, plain(engine.profile, jobs), strict=True):
        assert run.sequence.first_token == pytest.approx(first, abs=1e-6)
        assert run.end == pytest.approx(end, abs=1e-6)
        assert run.sequence.largest_gap == pytest.approx(longest, abs=1e-6)


def test_a_long_decode_is_one_event() -> None:
    events, fired = Events(), 0
    job = Job(events, 1000, 100_000)
    Engine(events, replace(TINY, kv_capacity=1e12)).decode(job.sequence)

    def count() -> bool:
        nonlocal fired
        fired += 1
        return False

    events.run(stop=count)
    assert job.end > 1000
    assert fired <= 2


def test_prefill_by_chunks_takes_as_long_as_the_equation_says() -> None:
    events, ends, chunks = Events(), list[float](), list[int]()
    engine = Engine(events, TINY)
    engine.forward(Forward(1300, 200, lambda: ends.append(events.now), on_chunk=chunks.append))
    engine.forward(Forward(100, 0, lambda: ends.append(events.now)))
    events.run()
    assert chunks == [512, 1024, 1300]
    # The last chunk leaves room in its step for the second prompt.
    both = TINY.prefill_seconds(1300, 200) + TINY.prefill_seconds(100)
    assert ends == [pytest.approx(both), pytest.approx(both)]


def test_decoding_goes_on_between_the_chunks_of_a_prompt() -> None:
    events = Events()
    engine, job, ends = Engine(events, TINY), Job(events, 100, 10), list[float]()
    engine.decode(job.sequence)
    engine.forward(Forward(1024, 0, lambda: ends.append(events.now)))
    events.run()
    assert job.sequence.largest_gap > TINY.decode_step_seconds(1, 102) + 0.02
    assert ends[0] == pytest.approx(
        TINY.prefill_seconds(1024) + sum(TINY.decode_step_seconds(1, 100 + i) for i in range(3)), abs=1e-3
    )


@settings(deadline=None, max_examples=40)
@given(
    jobs=st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 150)), min_size=1, max_size=12),
    capacity=st.integers(460, 1200),
)
def test_memory_is_never_exceeded_and_everybody_ends(jobs: list[tuple[float, int, int]], capacity: int) -> None:
    events = Events()
    engine = Engine(events, replace(TINY, kv_capacity=capacity * TINY.kv_per_token))
    runs = []
    for moment, context, tokens in jobs:
        run = Job(events, context, tokens)
        runs.append(run)
        events.at(moment, lambda run=run: engine.decode(run.sequence))  # type: ignore[misc]

    def full() -> bool:
        assert engine.kv_usage <= 1 + 1e-9
        return False

    events.run(stop=full)
    assert all(run.end > 0 for run in runs)
    assert engine.tokens_made == sum(tokens for _, _, tokens in jobs)
    assert engine.used_tokens == 0
    assert (engine.running, engine.waiting) == (0, 0)


def test_the_newest_is_preempted_and_computes_its_own_tokens_again() -> None:
    events = Events()
    engine = Engine(events, replace(TINY, kv_capacity=400 * TINY.kv_per_token))
    old, new = Job(events, 150, 150), Job(events, 150, 150)
    engine.decode(old.sequence)
    engine.decode(new.sequence)
    events.run()
    assert (old.sequence.preemptions, new.sequence.preemptions) == (0, 1)
    assert old.end < new.end
    assert engine.preemptions == 1


def test_a_stopped_sequence_leaves_with_the_step_in_progress() -> None:
    events = Events()
    engine, job, other = Engine(events, TINY), Job(events, 100, 100), Job(events, 100, 5)
    engine.decode(job.sequence)
    step = TINY.decode_step_seconds(1, 100)
    made = list[int]()
    events.at(2.5 * step, lambda: made.append(engine.stop(job.sequence)))
    events.at(2.6 * step, lambda: engine.decode(other.sequence))
    events.run()
    assert made == [2]
    assert job.end < 0
    assert other.end == pytest.approx(8 * step, rel=1e-2)


def test_at_most_max_num_seqs_decode_at_once() -> None:
    events = Events()
    engine = Engine(events, replace(TINY, max_num_seqs=2))
    jobs = [Job(events, 10, 10) for _ in range(3)]
    for job in jobs:
        engine.decode(job.sequence)
    assert (engine.running, engine.waiting) == (1, 2)  # the first step is under way
    events.run()
    assert jobs[2].sequence.first_token > jobs[0].end


def test_a_failed_engine_calls_nobody_back() -> None:
    events = Events()
    engine, job = Engine(events, TINY), Job(events, 100, 100)
    engine.decode(job.sequence)
    events.at(0.5, engine.fail)
    events.run()
    assert job.end < 0
    assert engine.kv_usage == 0


def test_others_on_the_same_cores_slow_the_steps() -> None:
    events, factor = Events(), [1.0]
    engine, job = Engine(events, TINY, lambda: factor[0]), Job(events, 100, 100)
    engine.decode(job.sequence)

    def slow() -> None:
        factor[0] = 2.0
        engine.replan()

    alone = sum(TINY.decode_step_seconds(1, 100 + i) for i in range(100))
    events.at(alone / 2, slow)
    events.run()
    assert job.end == pytest.approx(1.5 * alone, rel=0.02)
