"""Generators: what their papers print of them, determinism, and arrival processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.workload.arrivals import Arrivals, Process
from pdrelay.workload.generators import PDD_EVEN, PDD_HITS, AgenticRequests, AgentSessions, LongPrompts, Workload
from pdrelay.workload.hits import incomplete_beta, skewed_hits
from pdrelay.workload.summary import compare, summarise

ALL: list[Workload] = [
    AgenticRequests(Arrivals(11.5)),
    AgenticRequests(Arrivals(80), hits=PDD_EVEN),
    LongPrompts(Arrivals(3)),
    AgentSessions(Arrivals(0.2)),
]


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: type(workload).__name__)
def test_published_moments_are_met(workload: Workload) -> None:
    count = 300 if isinstance(workload, AgentSessions) else 20_000
    comparisons = compare(workload, count=count)
    assert comparisons
    for comparison in comparisons:
        assert abs(comparison.error) < 0.03, comparison


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: type(workload).__name__)
def test_a_seed_decides_everything(workload: Workload) -> None:
    first, same, other = (list(itertools.islice(workload.requests(seed), 50)) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert [r.arrival for r in first] == sorted(r.arrival for r in first)


def test_hit_rates_keep_their_range() -> None:
    hits = PDD_HITS.sample(np.random.default_rng(0), 10_000)
    assert hits.min() >= 0.02
    assert hits.max() <= 0.99


@settings(max_examples=25, deadline=None)
@given(mean=st.floats(0.3, 0.97), wanted=st.floats(0.1, 0.9))
def test_a_beta_is_found_or_refused(mean: float, wanted: float) -> None:
    try:
        found = skewed_hits(mean, wanted, above=0.95)
    except ConfigError:
        return
    assert found.a / (found.a + found.b) == pytest.approx(mean)
    assert found.share_above(0.95) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("a", "b", "x", "value"), [(2, 3, 0.4, 0.5248), (1, 1, 0.3, 0.3), (5, 1, 0.9, 0.59049)])
def test_incomplete_beta(a: float, b: float, x: float, value: float) -> None:
    assert incomplete_beta(a, b, x) == pytest.approx(value, rel=1e-6)
    assert incomplete_beta(b, a, 1 - x) == pytest.approx(1 - value, rel=1e-6)


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("constant", 0.0), ("bursty", 3.0), ("diurnal", 1.0)])
def test_arrival_processes_keep_rate_and_burstiness(process: Process, cv: float) -> None:
    moments = itertools.islice(Arrivals(10, process, period=100).times(np.random.default_rng(3)), 40_000)
    gaps = np.diff(list(moments))
    assert 1 / gaps.mean() == pytest.approx(10, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.15)


def test_a_diurnal_process_swings() -> None:
    moments = np.array(list(itertools.islice(Arrivals(10, "diurnal", swing=0.8, period=100).times(
        np.random.default_rng(3)), 20_000)))  # fmt: skip
    phase = moments % 100
    assert (phase < 50).mean() == pytest.approx(0.5 + 0.8 / np.pi, abs=0.02)


def test_turns_of_a_session_repeat_the_conversation() -> None:
    sessions = list(itertools.islice(AgentSessions(Arrivals(1), first=4096, shared=1024).requests(0), 20))
    for first in sessions:
        turns = list(first.turns())
        assert first.think == 0
        for before, after in itertools.pairwise(turns):
            assert after.prompt > before.prompt + before.output
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.think > 0
    assert sessions[0].blocks[:2] == sessions[1].blocks[:2]
    assert sessions[0].blocks[2] != sessions[1].blocks[2]
    assert summarise(sessions)["hit_mean"] > 0.7
