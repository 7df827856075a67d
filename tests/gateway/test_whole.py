"""Parameters across the seam on a whole deployment of emulated engines: what one engine alone would give."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref

import pytest
import whole
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.engine.emulated.tokens import Output, prompt_rows
from pdrelay.engine.logprobs import Row
from pdrelay.engine.messages import Sampling, StructuredOutput
from pdrelay.errors import EngineRejectedError
from pdrelay.gateway.base import Tier
from pdrelay.policy.base import Pipeline

VOCABULARY = whole.PROFILE.vocabulary


def rows_alone(prompt: list[int], sampling: Sampling) -> list[Row]:
    output = Output(VOCABULARY, prompt, sampling, whole.MAX_MODEL_LEN)
    rows, stop = [], output.exhausted()
    while stop is None:
        rows.append(output.row(b""))
        _, stop = output.generate(b"")
    return rows


def plain(rows: list[Row]) -> list[tuple[list[int], list[float], int]]:
    return [(list(row.ids), [round(value, 4) for value in row.values], row.rank) for row in rows]


@pytest.mark.parametrize("at", [None, 1, 2, 7, 19])
async def test_log_probabilities_are_spliced_with_their_tokens(at: int | None) -> None:
    sampling = Sampling(max_tokens=20, seed=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    prompt = whole.prompt_of(50)
    async with whole.running() as deployment:
        pipeline = Pipeline.P_MD if at is None else Pipeline.P_RLD_MD
        run = deployment.coordinator.generate(deployment.request(prompt, sampling, pipeline=pipeline, at=at))
        batches = [batch async for batch in run]
        await run.aclose()
        assert plain(run.prompt_logprobs.rows()) == plain(prompt_rows(prompt, VOCABULARY, 1))
    assert plain([row for batch in batches for row in batch.logprobs.rows()]) == plain(rows_alone(prompt, sampling))
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert {batch.tier for batch in batches} >= {Tier.PREFILL, Tier.MAIN}


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 80),
    at=st.integers(1, 40),
    mode=st.sampled_from(["one_shot", "catch_up"]),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(1, 40),
        min_tokens=st.sampled_from([0, 1]),
        seed=st.none() | st.integers(-5, 5),
        stop_token_ids=st.just([]) | st.just(list(range(1000, 1600))),
        ignore_eos=st.booleans(),
    ),
)
def test_any_request_with_any_seam_is_what_one_engine_gives(
    length: int, at: int, mode: str, sampling: Sampling
) -> None:
    prompt = whole.prompt_of(length, (length, at))

    async def ask() -> list[int]:
        async with whole.running() as deployment:
            request = deployment.request(prompt, sampling, pipeline=Pipeline.P_RLD_MD, at=at, mode=mode)
            ids = await deployment.ids(request)
            await whole.eventually(deployment.idle)
            return ids

    assert asyncio.run(ask()) == whole.reference(prompt, sampling)


@pytest.mark.parametrize("room", [1, 2, 5, 9])
@pytest.mark.parametrize("at", [1, 4, 8])
async def test_the_context_ends_the_output_on_every_engine(room: int, at: int) -> None:
    """Extends may not lead beyond it either: the relay ends the request, or main decode does."""
    prompt = whole.prompt_of(whole.MAX_MODEL_LEN - room)
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    async with whole.running() as deployment:
        for mode in ("one_shot", "catch_up"):
            request = deployment.request(prompt, sampling, pipeline=Pipeline.P_RLD_MD, at=at, mode=mode)
            run = deployment.coordinator.generate(request)
            ids = list(itertools.chain.from_iterable([batch.ids async for batch in run]))
            await run.aclose()
            assert (len(ids), run.finish.reason) == (room, "length")
            assert ids == whole.reference(prompt, sampling)
        await whole.eventually(deployment.idle)


@pytest.mark.parametrize("taken", [0, 1, 100])
@pytest.mark.parametrize("pipeline", [Pipeline.P_RLD_MD, Pipeline.P_MD])
async def test_a_request_that_ended_is_freed_without_a_collection(pipeline: Pipeline, taken: int) -> None:
    async with whole.running() as deployment:
        request = deployment.request(whole.prompt_of(50), Sampling(max_tokens=20, ignore_eos=True), pipeline=pipeline)
        run = deployment.coordinator.generate(request)
        freed = weakref.ref(run)
        gc.disable()
        try:
            batches = aiter(run)
            for _ in range(taken):
                if await anext(batches, None) is None:
                    break
            await batches.aclose()
            await run.aclose()
            del run, batches
            await whole.eventually(lambda: freed() is None)
        finally:
            gc.enable()


async def test_grammars_are_refused_by_emulated_engines() -> None:
    sampling = Sampling(max_tokens=4, structured=StructuredOutput(regex="a"))
    async with whole.running() as deployment:
        with pytest.raises(EngineRejectedError, match="cannot follow a grammar") as error:
            await deployment.ids(deployment.request(whole.prompt_of(20), sampling))
        assert error.value.status == 400
        await whole.eventually(deployment.idle)
