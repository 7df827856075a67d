from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.bench.prompts import Prompts, Scale
from pdrelay.workload.base import Request

ALPHABET = 1000
CHANCE = 4
"""Symbols by which unlike runs may begin alike: the chance of more is below 1 in 10^12."""


def common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests whose ids are a path in a tree of prefixes, as a trace's are."""
    paths = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=2, max_size=6))
    requests = []
    for path in paths:
        ids = tuple(int("1" + "".join(map(str, path[: i + 1])), 2) for i in range(len(path)))
        prompt = (len(path) - 1) * 512 + draw(st.integers(1, 512))
        whole = ids if draw(st.booleans()) else ids[: prompt // 512]
        requests.append(Request(0.0, prompt, 5, whole))
    return requests


@given(traces(), st.sampled_from([1.0, 0.25, 0.0303]))
def test_prefixes_are_shared_exactly_as_the_trace_says(trace: list[Request], factor: float) -> None:
    prompts = Prompts(ALPHABET)
    requests = [Scale(factor).apply(request) for request in trace]
    texts = [prompts.symbols(number, request) for number, request in enumerate(requests)]
    for (a, left), (b, right) in combinations(zip(requests, texts, strict=True), 2):
        said = min(common(list(a.blocks), list(b.blocks)) * a.block_tokens, a.prompt, b.prompt)
        assert said <= common(left, right) <= said + CHANCE
    assert [len(text) for text in texts] == [request.prompt for request in requests]


def test_the_same_seed_gives_the_same_prompts() -> None:
    request = Request(0.0, 1300, 5, (7, 8))
    assert Prompts(50, 1).symbols(3, request) == Prompts(50, 1).symbols(3, request)
    assert Prompts(50, 1).symbols(3, request) != Prompts(50, 2).symbols(3, request)
    assert max(Prompts(50).symbols(0, request)) < 50


def test_declared_hit_rates_share_the_warm_text() -> None:
    prompts = Prompts(ALPHABET)
    texts = [prompts.symbols(i, Request(0.0, 400, 5, cached=cached)) for i, cached in enumerate((100, 300, 0))]
    warm = prompts.warm(300)
    assert [cached <= common(text, warm) <= cached + CHANCE for text, cached in zip(texts, (100, 300, 0), strict=True)]
    assert common(texts[2], warm) <= CHANCE


def test_scaling_keeps_blocks_whole_and_turns_in_order() -> None:
    later = Request(0.0, 1536, 200, (1, 2, 3), session="s", think=2.0)
    request = Request(1.0, 1024, 100, (1, 2), session="s", then=later)
    scaled = Scale(1 / 30, 0.5).apply(request)
    assert [turn.block_tokens for turn in scaled.turns()] == [17, 17]
    assert [turn.prompt for turn in scaled.turns()] == [34, 51]
    assert [turn.output for turn in scaled.turns()] == [50, 100]
    assert all(turn.prompt == len(turn.blocks) * 17 for turn in scaled.turns())
    assert Scale(1 / 30).exact(512) == 17 / 512
    assert [b.think - a.think for a, b in pairwise(scaled.turns())] == [2.0]
