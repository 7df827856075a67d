"""Pages travel from one engine through the depot to another, and nothing but what is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engines import ADAPTER, PAGE_TOKENS, DepotThread, Engine, Run, at_once, pages

from pdrelay.engine.messages import Open, Sampling
from pdrelay.errors import EngineRejectedError, PdrelayError

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
async def nothing_is_left(depot: DepotThread):
    before = _held(depot)
    yield
    await _until(lambda: _held(depot) == before)


async def test_prefill_to_decode_is_exact(prefill: Engine, decode: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(109, "exact")  # ends inside a page; prefill takes it in chunks of 64 tokens
    depot.pin("transfer", pages(prompt).names)
    expected = await decode.reference(prompt, GREEDY)
    await decode.forget()
    depot.evict()
    first = (await prefill.prefill(prompt)).ids
    assert depot.holds(pages(prompt).names) == [True] * 4
    run = await decode.decode(prompt, GREEDY, [expected[1:4]], eager=first)
    assert (run.opened.cached_tokens, run.opened.loaded_tokens) == (0, 109)
    assert [*first, *run.predictions, *run.ids] == [expected[0], expected[1], *expected[4:]]
    depot.unpin("transfer")
    assert depot.holds(pages(prompt).names) == [True, True, True, False]  # a tail lives as long as somebody wants it


async def test_only_what_the_local_cache_lacks_is_loaded(prefill: Engine, decode: Engine, depot: DepotThread) -> None:
    long = prefill.tokens(200, "delta")
    short = long[:75]
    await decode.decode(short, GREEDY, [[]])
    depot.pin("transfer", pages(long).names)
    await prefill.prefill(long)
    run = await decode.decode(long, GREEDY, [[]])
    assert (run.opened.cached_tokens, run.opened.loaded_tokens) == (64, 136)
    depot.unpin("transfer")


async def test_prefill_publishes_what_its_own_cache_held(prefill: Engine, decode: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(140, "own hits")
    await prefill.prefill(prompt)
    depot.evict()
    assert depot.holds(pages(prompt).full) == [False] * 4
    run = await prefill.prefill([*prompt, 5, 6, 7])
    assert run.prefilled.cached_tokens == 128
    assert depot.holds(pages(prompt).full) == [True] * 4
    expected = await decode.reference(prompt[:130], GREEDY)  # loads the pages that were copied from the cache
    await decode.forget()
    depot.evict()
    assert await decode.reference(prompt[:130], GREEDY) == expected


async def test_prefill_loads_what_its_own_cache_lost(prefill: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(96, "lost")  # whole pages: a last one that is not would be there for two seconds
    first = await prefill.prefill(prompt)
    assert first.prefilled.cached_tokens == 0
    await prefill.forget()
    again = await prefill.prefill(prompt)
    assert (again.ids, again.prefilled.cached_tokens) == (first.ids, 96)


async def test_a_page_that_became_corrupt_in_the_arena_is_not_used(
    prefill: Engine, decode: Engine, depot: DepotThread
) -> None:
    prompt = prefill.tokens(200, "corrupt")
    expected = await decode.reference(prompt, GREEDY)
    await decode.forget()
    depot.evict()
    depot.pin("transfer", pages(prompt).names)
    await prefill.prefill(prompt)
    dropped = depot.stats().corrupt_pages
    for page, part, loaded in ((3, 7, 96), (0, 29, 0), (6, 0, 192)):
        depot.flip(pages(prompt).names[page], part)
        run = await decode.decode(prompt, GREEDY, [[]])
        assert run.ids == expected
        assert (run.opened.cached_tokens, run.opened.loaded_tokens) == (0, loaded)
        await decode.forget()
    assert depot.stats().corrupt_pages == dropped + 3
    assert all(depot.holds(pages(prompt).full)), "decode published what it computed instead"
    depot.unpin("transfer")


async def test_a_tail_carries_no_other_requests_bytes(prefill: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(37, "tail")
    tails = []
    for round_ in range(2):
        await prefill.forget()
        depot.evict()
        for other in range(4):  # fills the blocks that come next with other content each round
            await prefill.prefill(prefill.tokens(64, f"noise {round_} {other}"))
        await prefill.forget()
        depot.pin("transfer", pages(prompt).names)
        await prefill.prefill(prompt)
        tails.append(depot.page(pages(prompt).names[-1]))
        depot.unpin("transfer")
    assert tails[0] == tails[1]
    # 5 of 32 tokens are there; of 32 keys and values the other 27 must be zero, wherever the layout puts them.
    assert tails[0].count(0) >= len(tails[0]) * 27 // PAGE_TOKENS


async def test_decode_publishes_the_pages_that_its_output_fills(decode: Engine, depot: DepotThread) -> None:
    prompt, sampling = decode.tokens(40, "answer"), Sampling(max_tokens=60, temperature=0, ignore_eos=True)
    run = await decode.decode(prompt, sampling, [[]])
    conversation = pages([*prompt, *run.ids[:-1]])
    assert depot.holds(conversation.full) == [True] * 3
    async with asyncio.timeout(5):
        await decode.control.wait(conversation.full, decode.name)


async def test_a_salt_keeps_tenants_apart(prefill: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(70, "salt")
    await prefill.prefill(prompt, salt="a")
    assert depot.holds(pages(prompt, "a").full) == [True, True]
    assert depot.holds(pages(prompt).full) == [False, False]
    assert (await prefill.prefill(prompt, salt="b")).prefilled.cached_tokens == 0


async def test_an_adapter_computes_its_own_pages_and_says_what_stock_vllm_says(
    prefill: Engine, decode: Engine, depot: DepotThread
) -> None:
    prompt = prefill.tokens(109, "adapter")
    expected = await decode.reference(prompt, GREEDY, ADAPTER)
    assert expected != await decode.reference(prompt, GREEDY)
    await decode.forget()
    depot.evict()
    depot.pin("transfer", [*pages(prompt).names, *pages(prompt, lora=ADAPTER).names])
    await prefill.prefill(prompt)
    adapted = await prefill.prefill(prompt, lora=ADAPTER)
    assert (adapted.ids, adapted.prefilled.cached_tokens) == (expected[:1], 0), "the base's pages are not its own"
    run = await decode.decode(prompt, GREEDY, [expected[1:4]], eager=adapted.ids, lora=ADAPTER)
    assert (run.opened.cached_tokens, run.opened.loaded_tokens) == (0, 109)
    assert run.ids == expected[4:]
    with pytest.raises(EngineRejectedError, match="d-0 has no adapter 'poet'; it has pirate"):
        await decode.decode(prompt, GREEDY, [[]], lora="poet")
    depot.unpin("transfer")


async def test_preempted_requests_load_again(prefill: Engine, decode: Engine, depot: DepotThread) -> None:
    sampling = Sampling(max_tokens=70, temperature=0, ignore_eos=True)
    prompts = [prefill.tokens(736, start) for start in ("crowd one", "crowd two")]
    expected = await at_once(*(prefill.reference(prompt, sampling) for prompt in prompts))
    for prompt in prompts:
        await prefill.prefill(prompt)
    await decode.forget()
    before = depot.stats().use[decode.name]
    runs = await asyncio.gather(*(decode.decode(prompt, sampling, [[]]) for prompt in prompts))
    assert [run.ids for run in runs] == expected
    await _until(lambda: depot.stats().use[decode.name].requests == before.requests + 2)
    after = depot.stats().use[decode.name]
    assert after.arena - before.arena == 2 * 736
    assert after.reloaded > before.reloaded, "what the other request took of its blocks came from the depot"


async def test_abort_during_prefill_and_load_frees_everything(
    prefill: Engine, decode: Engine, depot: DepotThread
) -> None:
    prompt = prefill.tokens(700, "abort")
    for delay in (0.0, 0.05, 0.3):
        await _abort_after(delay, prefill, Open(sid=f"p{delay}", mode="prefill", prompt=prompt, sampling=GREEDY))
        await prefill.forget()
    await prefill.prefill(prompt)
    for delay in (0.0, 0.01, 0.03, 0.06):
        await _abort_after(delay, decode, Open(sid=f"d{delay}", mode="decode", prompt=prompt, sampling=GREEDY))
        await decode.forget()


async def test_pages_of_a_writer_that_died_are_written_by_another(prefill: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(800, "orphan")
    dying = Open(sid="dying", mode="prefill", prompt=prompt, sampling=GREEDY)
    task = asyncio.create_task(prefill.run(dying, into=Run()))
    await _until(lambda: depot.stats().reserved > 0)
    second = asyncio.create_task(prefill.prefill(prompt))
    await _until(lambda: prefill.backend.load().running == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await second
    assert all(depot.holds(pages(prompt).full))


async def test_prefills_wait_for_room_in_the_arena(prefill: Engine, depot: DepotThread) -> None:
    waits = depot.stats().reserve_waits
    *fitting, waiting = (prefill.tokens(900, f"room {index}") for index in range(4))  # 29 pages each; 100 fit
    depot.pin("transfers", [name for prompt in fitting for name in pages(prompt).names])
    try:
        for prompt in fitting:
            await prefill.prefill(prompt)
        task = asyncio.create_task(prefill.prefill(waiting))
        await _until(lambda: depot.stats().reserve_waits > waits + 3)
        assert not task.done()
        assert len((await prefill.prefill(fitting[0])).ids) == 1  # who needs no room does not wait
    finally:
        depot.unpin("transfers")
    assert len((await task).ids) == 1
    assert all(depot.holds(pages(waiting).full))


async def test_engines_outlive_their_depot(prefill: Engine, decode: Engine, depot: DepotThread) -> None:
    prompt = prefill.tokens(100, "outlive")
    expected = await decode.reference(prompt, GREEDY)
    depot.stop()
    try:
        assert (await decode.decode(prompt, GREEDY, [expected[1:3]], eager=expected[:1])).ids == expected[3:]
        with pytest.raises(EngineRejectedError, match="not published: the depot of this host") as error:
            await prefill.prefill(prompt)
        assert error.value.status == 503
    finally:
        depot.start()
    async with asyncio.timeout(20):
        while not await _publishes(prefill, prompt):  # noqa: ASYNC110 - the engine connects by itself
            await asyncio.sleep(0.2)
    assert depot.holds(pages(prompt).full) == [True] * 3
    async with asyncio.timeout(10):
        await decode.control.ready(10)
        await decode.decode(prompt, GREEDY, [[]])
        await decode.control.wait(pages(prompt).full, decode.name)  # it told the new depot what it holds


async def _publishes(engine: Engine, prompt: list[int]) -> bool:
    try:
        await engine.prefill(prompt)
    except PdrelayError:
        return False
    return True


async def _abort_after(delay: float, engine: Engine, request: Open) -> None:
    task = asyncio.create_task(engine.run(request, into=Run()))
    await asyncio.sleep(delay)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _held(depot: DepotThread) -> tuple[int, int, int]:
    stats = depot.stats()
    return stats.reserved, stats.pinned, stats.leases


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the depot lives on another thread
            await asyncio.sleep(0.02)
