"""Sessions on an engine with little KV cache: they take turns, and where they cannot, the youngest goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from engines import Engine, Run, at_once

from pdrelay.engine.base import Chunk
from pdrelay.engine.messages import Extend, Extended, Open, Sampling, Takeover
from pdrelay.engine.vllm.admission import Admission, Budget
from pdrelay.engine.vllm.watchdog import Watchdog
from pdrelay.errors import EngineRejectedError

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

GREEDY = Sampling(max_tokens=60, temperature=0, ignore_eos=True)


@contextmanager
def limits(engine: Engine, budget: Budget, patience: float) -> Iterator[None]:
    backend = engine.backend
    before = backend._shared
    backend._shared = before._replace(admission=Admission(budget), watchdog=Watchdog(patience))
    try:
        yield
    finally:
        backend._shared = before


async def handed_over(engine: Engine, name: str, prompt: list[int], expected: list[int], run: Run) -> None:
    """A session that extends by 40 tokens, once `run` has seen it opened, and takes over."""

    async def feed() -> AsyncIterator[Chunk]:
        yield Extend(name, expected[:40])
        yield Takeover(name, expected[40:45])

    request = Open(sid=name, mode="decode", prompt=prompt, sampling=GREEDY)
    await engine.backend.run(request, feed(), run.events.append)


async def references(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """The uninterrupted runs, three at a time: so many fit."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), 3):
        found += await at_once(*(engine.reference(prompt, sampling) for prompt in prompts[start : start + 3]))
    return found


async def test_sessions_that_do_not_fit_together_take_turns(decode: Engine) -> None:
    from pdrelay.engine.vllm.plugin import budget_of

    assert budget_of(decode.llm.vllm_config) == Budget(48 * 32, 32, 8)
    prompts = [decode.tokens(330, f"turns {number}") for number in range(6)]
    expected = await references(decode, prompts, GREEDY)
    runs = [Run() for _ in prompts]
    async with asyncio.timeout(120):
        await asyncio.gather(
            *(handed_over(decode, f"t{i}", prompts[i], expected[i], runs[i]) for i in range(len(prompts)))
        )
    assert [run.ids for run in runs] == [ids[45:] for ids in expected]
    load = decode.backend.load()
    assert (load.running, load.waiting) == (0, 0)
    await decode.forget()  # succeeds only when no request holds a block


async def test_sessions_that_block_each_other_lose_the_youngest(decode: Engine) -> None:
    """Without the budget: five sessions of 9 blocks leave 2 of the 47 free ones, and each needs 3 more."""
    sampling = msgspec.structs.replace(GREEDY, max_tokens=100)
    prompts = [decode.tokens(286, f"block {number}") for number in range(5)]
    expected = await references(decode, prompts, sampling)
    await decode.forget()
    runs = [Run() for _ in prompts]
    opened = asyncio.Event()

    async def held(number: int) -> None:
        async def feed() -> AsyncIterator[Chunk]:
            await opened.wait()
            yield Extend(f"b{number}", expected[number][:80])
            yield Takeover(f"b{number}", expected[number][80:85])

        request = Open(sid=f"b{number}", mode="decode", prompt=prompts[number], sampling=sampling)
        await decode.backend.run(request, feed(), runs[number].events.append)

    with limits(decode, Budget(1 << 30, 32, 64), patience=3.0):
        async with asyncio.timeout(120):
            tasks = [asyncio.create_task(held(number)) for number in range(5)]
            while not all(run.events for run in runs):  # noqa: ASYNC110 - emit is a plain callback
                await asyncio.sleep(0.01)
            opened.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
    ended = [result for result in results if result is not None]
    assert ended
    assert all(isinstance(result, EngineRejectedError) and result.status == 503 for result in ended)
    assert results[0] is None  # the oldest got on
    for run, ids, result in zip(runs, expected, results, strict=True):
        if result is None:
            assert any(isinstance(event, Extended) for event in run.events)
            assert run.ids == ids[85:]
    await decode.forget()


async def test_a_long_list_of_seeded_output_is_computed_in_chunks(prefill: Engine) -> None:
    """Prefill takes at most 64 tokens a step; vLLM's own code would end a seeded request's engine here."""
    sampling = Sampling(max_tokens=140, temperature=1.0, seed=3, ignore_eos=True)
    prompt = prefill.tokens(70, "seeded")
    expected = await prefill.reference(prompt, sampling)
    run = await prefill.decode(prompt, sampling, [expected[:100], expected[100:130]])
    assert run.ids == expected[130:]
    assert run.predictions == [expected[0], expected[100]]
