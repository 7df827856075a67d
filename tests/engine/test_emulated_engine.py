"""The emulated engine: every correct path gives what one engine alone gives, and every mistake shows."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from emulated_kit import (
    CONTRACT,
    PROFILE,
    decode,
    decode_request,
    drain,
    ids_of,
    pages_of,
    prefill,
    prompt_of,
    reference,
    sampling_of,
    ship,
    sites,
    tokens_are_contiguous,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.depot.base import PageKind, Use
from pdrelay.engine.emulated.sequence import Running
from pdrelay.engine.messages import Extended, Failed, Finished, Open, Opened, Sampling


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 333, 1500])
async def test_every_path_gives_the_reference(length: int) -> None:
    prompt, sampling = prompt_of(length), sampling_of()
    expected, stop = reference(prompt, sampling)
    async with sites(("P", "RLD"), ("MD",)) as (near, far):
        first, finished = await prefill(near, prompt, sampling)
        assert (first.index, first.ids, finished.reason) == (0, expected[:1], None)
        await ship(near, far, prompt)
        relayed = await decode(near.engines["RLD"], decode_request(prompt, sampling, expected[:1]))
        assert ids_of(relayed) == expected[1:]
        assert relayed[0].loaded_tokens == length
        main = await decode(far.engines["MD"], decode_request(prompt, sampling, expected[:1]), [expected[1:9]])
        assert ids_of(main) == expected[9:]
        assert (main[-1].reason, main[-1].stop_reason) == stop
        assert tokens_are_contiguous(main)
        assert isinstance(main[0], Opened)
        assert (main[0].loaded_tokens, main[0].prediction) == (length, expected[1])


@pytest.mark.parametrize("damaged", [0, 2, 3])
async def test_one_wrong_byte_changes_all_that_follows(damaged: int) -> None:
    prompt, sampling = prompt_of(55), sampling_of(ignore_eos=True)
    expected, _ = reference(prompt, sampling)
    async with sites(("P",), ("MD",)) as (near, far):
        await prefill(near, prompt, sampling)
        await ship(near, far, prompt, damage=damaged)
        main = ids_of(await decode(far.engines["MD"], decode_request(prompt, sampling, expected[:1])))
        assert len(main) == len(expected) - 1
        assert sum(a == b for a, b in zip(main, expected[1:], strict=True)) == 0


async def test_what_is_computed_on_wrong_kv_is_wrong_everywhere() -> None:
    """MD's cache and its published pages carry the mistake to the next turn, as real KV would."""
    prompt, sampling = prompt_of(55), sampling_of(ignore_eos=True)
    async with sites(("P",), ("MD", "other")) as (near, far):
        await prefill(near, prompt, sampling)
        await ship(near, far, prompt, damage=1)
        answer = ids_of(await decode(far.engines["MD"], decode_request(prompt, sampling)))
        turn = prompt + answer
        names = list(pages_of(turn).full[: (len(turn) - 1) // 16])
        await far.control.wait(names)
        request = Open(sid="next", mode="decode", prompt=turn, sampling=sampling, await_names=names)
        expected, _ = reference(turn, sampling)
        for engine in far.engines.values():
            assert ids_of(await decode(engine, request))[:3] != expected[:3]


@pytest.mark.parametrize("damaged", [0, 2, 3])
async def test_what_became_corrupt_in_the_arena_is_computed_anew(damaged: int) -> None:
    prompt, sampling = prompt_of(55), sampling_of(ignore_eos=True)
    expected, _ = reference(prompt, sampling)
    async with sites(("P", "RLD")) as (near,):
        await prefill(near, prompt, sampling)
        page = near.depot.hub.index.get(pages_of(prompt).names[damaged])
        assert page is not None
        near.depot.arena[page.offset + 12345 % CONTRACT.page_bytes] ^= 1
        relayed = await decode(near.engines["RLD"], decode_request(prompt, sampling, expected[:1]))
        assert ids_of(relayed) == expected[1:]
        assert relayed[0].loaded_tokens == damaged * 16
        assert near.depot.hub.stats().corrupt_pages == 1
        assert (await prefill(near, prompt, sampling, "again"))[0].ids == expected[:1]
        assert near.depot.hub.index.match(pages_of(prompt).names) == 4, "prefill produced it anew"


async def test_pages_of_another_prompt_do_not_fit() -> None:
    """A prompt that differs in its first token shares no page name, and no output."""
    prompt, sampling = prompt_of(50), sampling_of()
    other = [prompt[0] + 1, *prompt[1:]]
    assert not set(pages_of(prompt).names) & set(pages_of(other).names)
    assert reference(prompt, sampling)[0][:2] != reference(other, sampling)[0][:2]


async def test_prefix_hits_are_not_computed_again() -> None:
    prompt, sampling = prompt_of(100), sampling_of()
    async with sites(("P",)) as (near,):
        assert (await prefill(near, prompt, sampling, "a"))[0].prefilled.cached_tokens == 0
        assert (await prefill(near, prompt, sampling, "b"))[0].prefilled.cached_tokens == 100  # the tail from the depot
        longer = prompt[:70] + prompt_of(40, seed=1)
        assert (await prefill(near, longer, sampling, "c"))[0].prefilled.cached_tokens == 64
        assert near.depot.hub.stats().use == {"P": Use(requests=3, own=96 + 64, arena=4, computed=100 + 46)}


async def test_what_the_arena_lost_comes_back_from_disk() -> None:
    prompt, sampling = prompt_of(96), sampling_of()
    expected, _ = reference(prompt, sampling)
    async with sites(("P", "RLD"), arena=7 * CONTRACT.page_bytes, disk=32 * CONTRACT.page_bytes) as (near,):
        await prefill(near, prompt, sampling, "a", pinned=False)
        await prefill(near, prompt_of(96, seed=1), sampling, "b", pinned=False)  # takes most of the arena
        run = await decode(near.engines["RLD"], decode_request(prompt, sampling, expected[:1]))
        assert ids_of(run) == expected[1:]
        use, disk = near.depot.hub.stats().use["RLD"], near.depot.hub.stats().disk
        assert use == Use(requests=1, arena=96 - 16 * disk.restored_pages, disk=16 * disk.restored_pages)
        assert disk.restored_pages >= 4


async def test_a_page_that_is_evicted_between_wait_and_load_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, sampling = prompt_of(100), sampling_of()
    expected, _ = reference(prompt, sampling)
    async with sites(("P", "RLD")) as (near,):
        await prefill(near, prompt, sampling)
        index, admit = near.depot.hub.index, Running.admit

        async def evict_and_admit(running: Running, output_tokens: int) -> None:
            page = index.get(pages_of(prompt).full[3])
            assert page is not None
            await near.control.end(pages_of(prompt).names[-1].hex())  # nothing keeps the pages any more
            index._evict(page)
            await admit(running, output_tokens)

        monkeypatch.setattr(Running, "admit", evict_and_admit)
        run = await decode(near.engines["RLD"], decode_request(prompt, sampling, expected[:1]))
        assert (ids_of(run), run[0].loaded_tokens) == (expected[1:], 48)


async def test_an_adapter_never_reads_the_pages_of_its_base() -> None:
    prompt, sampling = prompt_of(96), sampling_of()
    base, (adapted, _) = reference(prompt, sampling), reference(prompt, sampling, "pirate")
    assert base[0] != adapted
    async with sites(("P", "RLD")) as (near,):
        await prefill(near, prompt, sampling, "a")
        for sid, cached in (("b", 0), ("c", 96)):
            request = Open(sid=sid, mode="prefill", prompt=prompt, sampling=sampling, lora="pirate")
            first, _ = await drain(near.engines["P"].open(request))
            assert (first.ids, first.prefilled.cached_tokens) == (adapted[:1], cached)
        request = Open(sid="d", mode="decode", prompt=prompt, sampling=sampling, lora="pirate")
        run = await decode(near.engines["RLD"], request)
        assert (ids_of(run), run[0].loaded_tokens) == (adapted, 96)
        unknown = Open(sid="e", mode="decode", prompt=prompt, sampling=sampling, lora="poet")
        (failed,) = await decode(near.engines["RLD"], unknown)
        assert failed.message == "the engine has no adapter 'poet'; it has pirate"


async def test_an_engine_that_restarts_finds_its_pages_at_the_depot() -> None:
    prompt, sampling = prompt_of(100), sampling_of()
    async with sites(("P", "RLD")) as (near,):
        expected = ids_of(await prefill(near, prompt, sampling, "a"))
        await near.restart("P")
        first, _ = await prefill(near, prompt, sampling, "b")
        assert (first.ids, first.prefilled.cached_tokens) == (expected, 100)
        assert near.depot.hub.stats().use["P"] == Use(requests=2, arena=100, computed=100)


async def test_own_hits_are_published_where_the_depot_lost_them() -> None:
    prompt, sampling = prompt_of(100), sampling_of()
    async with sites(("P", "RLD"), arena=8 * CONTRACT.page_bytes) as (near,):
        expected = ids_of(await prefill(near, prompt, sampling, "a", pinned=False))
        await prefill(
            near, prompt_of(100, seed=1), sampling, "b", pinned=False
        )  # pushes the first prompt out of the arena
        assert near.depot.engine("look", CONTRACT).match(pages_of(prompt).names) < 7
        assert ids_of(await prefill(near, prompt, sampling, "c")) == expected
        relayed = await decode(near.engines["RLD"], decode_request(prompt, sampling))
        assert ids_of(relayed) == reference(prompt, sampling)[0]
        assert relayed[0].loaded_tokens == 100


async def test_missing_pages_are_computed() -> None:
    prompt, sampling = prompt_of(100), sampling_of()
    async with sites(("MD",)) as (far,):
        request = Open(
            sid="d", mode="decode", prompt=prompt, sampling=sampling, eager=reference(prompt, sampling)[0][:3]
        )
        events = await decode(far.engines["MD"], request)
        assert ids_of(events) == reference(prompt, sampling)[0][3:]
        assert events[0].loaded_tokens == events[0].cached_tokens == 0


async def test_next_turn_finds_the_answer_at_main_decode(eventually) -> None:
    prompt, sampling = prompt_of(50), sampling_of(60, ignore_eos=True)
    async with sites(("MD", "other")) as (far,):
        answer = ids_of(await decode(far.engines["MD"], Open(sid="a", mode="decode", prompt=prompt, sampling=sampling)))
        turn = prompt + answer + prompt_of(20, seed=3)
        whole = 109 // 16 * 16  # the last token of the answer has no KV
        request = Open(sid="b", mode="decode", prompt=turn, sampling=sampling)
        events = await decode(far.engines["MD"], request)
        assert events[0].cached_tokens == whole
        await far.control.wait(list(pages_of(turn).full[3 : whole // 16]))
        look = far.depot.engine("look", CONTRACT)
        assert look.match(pages_of(turn).full[3:]) == whole // 16 - 3  # pages that the output filled, no others
        assert ids_of(events) == reference(turn, sampling)[0]


async def test_more_output_than_was_asked_for_is_rejected() -> None:
    async with sites(("MD",)) as (far,):
        request = Open(sid="d", mode="decode", prompt=prompt_of(20), sampling=sampling_of(5))
        failed = (await decode(far.engines["MD"], request, [[7] * 3, [7] * 3]))[-1]
        assert isinstance(failed, Failed)
        assert (failed.status, far.backends["MD"].load().running) == (400, 0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_reference(data: st.DataObject) -> None:
    prompt = prompt_of(data.draw(st.integers(1, 70), label="prompt"), seed=7)
    sampling = sampling_of(data.draw(st.integers(1, 50), label="max_tokens"), seed=5)
    expected, stop = reference(prompt, sampling)
    known = data.draw(st.integers(0, len(expected) - 1), label="known")
    cuts = sorted(data.draw(st.lists(st.integers(0, known), max_size=6), label="cuts"))
    edges = [0, *cuts, known]
    runs = [expected[a:b] for a, b in itertools.pairwise(edges)]

    async def run() -> None:
        async with sites(("P", "MD")) as (site,):
            await prefill(site, prompt, sampling)
            request = decode_request(prompt, sampling, runs[0])
            events = await decode(site.engines["MD"], request, runs[1:] or [[]])
            assert ids_of(events) == expected[known:]
            assert (events[-1].reason, events[-1].stop_reason) == stop
            extended = [event for event in events if isinstance(event, Extended)]
            assert [event.computed for event in extended] == edges[2:-1]
            assert all(event.prediction == expected[event.computed] for event in extended)

    asyncio.run(run())


async def test_a_lost_or_doubled_token_changes_all_that_follows() -> None:
    prompt, sampling = prompt_of(40), sampling_of(ignore_eos=True)
    expected, _ = reference(prompt, sampling)
    async with sites(("MD",)) as (far,):
        for sid, wrong in (("lost", expected[1:10]), ("doubled", [expected[0], *expected[:10]])):
            request = Open(sid=sid, mode="decode", prompt=prompt, sampling=sampling)
            got = ids_of(await decode(far.engines["MD"], request, [wrong]))
            assert not set(got[:5]) & set(expected)


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"max_tokens": 1}, lambda ids, finished: len(ids) == 1 and finished.reason == "length"),
        ({"max_tokens": 5}, lambda ids, finished: len(ids) == 5 and finished.reason == "length"),
        ({"max_tokens": 4000}, lambda ids, finished: ids[-1] == 2 and finished == Finished(sid="d", reason="stop")),
        ({"max_tokens": 4000, "ignore_eos": True}, lambda ids, _: len(ids) == 4000 and 2 in ids),
        ({"max_tokens": 4000, "min_tokens": 3000}, lambda ids, _: len(ids) > 3000 and 2 not in ids[:3000]),
        ({"max_tokens": 10_000, "ignore_eos": True}, lambda ids, f: len(ids) == 4086 and f.reason == "length"),
    ],
)
def test_stop_conditions(options: dict, check) -> None:
    ids, stop = reference(prompt_of(10), Sampling(**options))
    assert check(ids, Finished(sid="d", reason=stop[0], stop_reason=stop[1]))


async def test_stop_token_ends_with_its_id() -> None:
    prompt = prompt_of(30)
    token = reference(prompt, sampling_of(ignore_eos=True))[0][6]
    sampling = sampling_of(stop_token_ids=[token])
    async with sites(("MD",)) as (far,):
        events = await decode(far.engines["MD"], Open(sid="d", mode="decode", prompt=prompt, sampling=sampling))
        assert events[-2].last
        assert events[-1] == Finished(sid="d", reason="stop", stop_reason=token)
        assert ids_of(events) == reference(prompt, sampling)[0]


def test_seed_changes_the_output() -> None:
    outputs = [tuple(reference(prompt_of(10), sampling_of(seed=seed))[0][:4]) for seed in (None, 0, 1, -1)]
    assert len(set(outputs)) == 4


async def test_token_zero_can_end_a_request() -> None:
    async with sites(("P",)) as (near,):
        tokens, finished = await prefill(near, prompt_of(30), sampling_of(1))
        assert tokens.last
        assert finished.reason == "length"


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Open(sid="d", mode="decode", prompt=[], sampling=Sampling(max_tokens=5)), "empty"),
        (Open(sid="d", mode="decode", prompt=[1] * 4096, sampling=Sampling(max_tokens=5)), "context of 4096"),
        (Open(sid="d", mode="decode", prompt=[1, -1], sampling=Sampling(max_tokens=5)), "-1 is not a token id"),
        (Open(sid="d", mode="decode", prompt=[1], sampling=Sampling(max_tokens=0)), "max_tokens is 0"),
        (Open(sid="d", mode="prefill", prompt=[1] * 2000, sampling=Sampling(max_tokens=5)), "does not fit"),
    ],
)
async def test_bad_requests_are_rejected(request_: Open, text: str) -> None:
    async with sites(("P",), arena=100 * CONTRACT.page_bytes) as (near,):
        (failed,) = await drain(near.engines["P"].open(request_))
        assert isinstance(failed, Failed)
        assert failed.status == 400
        assert text in failed.message


async def test_a_full_arena_makes_prefill_wait(eventually) -> None:
    prompt, sampling = prompt_of(60), sampling_of()
    async with sites(("P",), arena=5 * CONTRACT.page_bytes) as (near,):
        hog = near.depot.engine("hog", CONTRACT)
        hog.reserve("x", [b"h" * 32, b"i" * 32], [PageKind.PREFIX] * 2)
        running = asyncio.create_task(prefill(near, prompt, sampling))
        await eventually(lambda: near.depot.hub.stats().reserve_waits > 1)
        assert not running.done()
        hog.release("x")
        assert ids_of(await running) == reference(prompt, sampling)[0][:1]


async def test_abort_anywhere_frees_everything(eventually) -> None:
    """Sessions are aborted after any number of loop ticks: in admission, loading, computing, waiting, decoding."""
    prompt, sampling = prompt_of(300), sampling_of(2000, ignore_eos=True)
    async with sites(("P", "MD")) as (site,):
        for ticks in range(0, 120, 3):
            site.depot.hub.stats()
            fresh = [ticks + 1000, *prompt]
            sessions = [
                site.engines["P"].open(Open(sid=f"p{ticks}", mode="prefill", prompt=fresh, sampling=sampling)),
                site.engines["MD"].open(decode_request(fresh, sampling, sid=f"w{ticks}")),
                site.engines["MD"].open(Open(sid=f"d{ticks}", mode="decode", prompt=fresh, sampling=sampling)),
            ]
            sessions[2].takeover([])
            for _ in range(ticks):
                await asyncio.sleep(0)
            for session in sessions:
                session.abort()
        for backend in site.backends.values():
            await eventually(lambda: backend.load().running == backend.load().waiting == 0)  # noqa: B023
            assert backend.load().kv_usage == 0
        await eventually(lambda: site.depot.hub.stats().leases == 0)
        stats = site.depot.hub.stats()
        assert (stats.reserved, stats.pinned, stats.leases) == (0, 0, 0)
        assert len(ids_of(await prefill(site, prompt, sampling))) == 1


async def test_many_sequences_share_steps() -> None:
    async with sites(("MD",)) as (far,):
        prompts = [prompt_of(20 + n, seed=n) for n in range(100)]  # more than max_num_seqs
        sampling = sampling_of(20)
        requests = [
            Open(sid=str(n), mode="decode", prompt=prompt, sampling=sampling) for n, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(*(decode(far.engines["MD"], request) for request in requests))
        assert [ids_of(events) for events in results] == [reference(prompt, sampling)[0] for prompt in prompts]


async def test_cache_is_bounded_and_reported(eventually) -> None:
    kv = msgspec.structs.replace(PROFILE.kv, capacity=f"{20 * CONTRACT.page_bytes}B")
    small = msgspec.structs.replace(PROFILE, kv=kv)
    async with sites(("P",), profile=small) as (near,):
        for seed in range(6):
            await prefill(near, prompt_of(160, seed=seed), sampling_of(), sid=str(seed))
        # What the engine holds the depot knows: waiting for its newest prompt ends at once, without the arena.
        memory = near.backends["P"]._parts.memory
        assert len(memory._idle) == 20
        assert memory.usage == 0


async def test_a_lost_depot_fails_sessions_and_comes_back() -> None:
    prompt, sampling = prompt_of(60), sampling_of()
    async with sites(("P",)) as (near,):
        await prefill(near, prompt, sampling, "a")
        near.depot.die()
        (failed,) = await prefill(near, prompt_of(60, seed=1), sampling, "b", pinned=False)
        assert failed.status == 500
        assert "gone" in failed.message
        near.depot.alive = True
        assert ids_of(await prefill(near, prompt, sampling, "c")) == reference(prompt, sampling)[0][:1]
