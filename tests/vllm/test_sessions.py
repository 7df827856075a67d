"""A session whose output is handed over in chunks equals the uninterrupted run, token for token, in float32."""

from __future__ import annotations

import pytest
from engines import Engine, Run

from pdrelay.engine.messages import Extend, Open, Sampling, Takeover
from pdrelay.errors import EngineRejectedError

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SAMPLINGS = {
    "greedy": Sampling(max_tokens=24, temperature=0, ignore_eos=True),
    "penalties": Sampling(
        max_tokens=24,
        temperature=0,
        presence_penalty=1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.1,
        ignore_eos=True,
    ),
    "seeded": Sampling(max_tokens=24, temperature=1.0, seed=1234, ignore_eos=True),
    "seeded top-p": Sampling(max_tokens=24, temperature=0.9, top_p=0.9, top_k=40, seed=7, presence_penalty=0.5),
}


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_handed_over_output_equals_the_uninterrupted_run(decode: Engine, name: str) -> None:
    sampling, prompt = SAMPLINGS[name], decode.tokens(53, name)
    expected = await decode.reference(prompt, sampling)
    whole = await decode.decode(prompt, sampling, [expected[:7], expected[7:12], expected[12:13]])
    assert whole.ids == expected[13:]
    # What the engine would have said itself at each seam.
    assert whole.predictions == [expected[0], expected[7], expected[12]]


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_eager_tokens_are_output_tokens(decode: Engine, name: str) -> None:
    sampling, prompt = SAMPLINGS[name], decode.tokens(70, name)
    expected = await decode.reference(prompt, sampling)
    for _ in range(2):  # the second finds prompt and eager tokens in the prefix cache
        whole = await decode.decode(prompt, sampling, [expected[9:11]], eager=expected[:9])
        assert [*whole.predictions, *whole.ids] == [expected[9], *expected[11:]]


@pytest.mark.parametrize("name", ["greedy", "seeded"])
async def test_taking_over_without_a_new_token(decode: Engine, name: str) -> None:
    sampling, prompt = SAMPLINGS[name], decode.tokens(64, f"nothing new {name}")
    expected = await decode.reference(prompt, sampling)
    assert (await decode.decode(prompt, sampling, [[]], eager=expected[:5])).ids == expected[5:]
    assert (await decode.decode(prompt, sampling, [expected[:3], [], []])).ids == expected[3:]
    assert (await decode.decode(prompt, sampling, [[]])).ids == expected


async def test_a_seeded_prompt_in_chunks_equals_one_in_a_single_step(prefill: Engine, decode: Engine) -> None:
    prompt, sampling = decode.tokens(150, "seed"), SAMPLINGS["seeded"]
    expected = await decode.reference(prompt, sampling)
    assert await prefill.reference(prompt, sampling) == expected
    await prefill.forget()
    assert (await prefill.prefill(prompt, sampling)).ids == expected[:1]


async def test_a_grammar_goes_on_where_the_other_engine_stopped(decode: Engine) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    from pdrelay.engine.vllm import session_params
    from pdrelay.engine.vllm.session import Chunk, Session

    def params(max_tokens: int, eager: list[int] | None = None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens, temperature=0, output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(regex=r"[a-z]{3}-[0-9]{12}-[A-Z]{8}"),
            extra_args={session_params.EAGER: eager} if eager else None,
        )  # fmt: skip

    prompt, expected = decode.tokens(40, "grammar"), []
    async for output in decode.llm.generate({"type": "token", "prompt_token_ids": prompt}, params(40), "grammar"):
        expected += output.outputs[0].token_ids
    assert len(expected) > 8
    for eager in ([], expected[:2]):
        chunks = [Chunk(prompt, params(len(eager) + 1, eager)), Chunk(expected[len(eager) : 6], params(7))]
        session = Session(decode.llm, f"grammar {len(eager)}", chunks[0])
        for chunk in chunks:
            assert [output.finish_reason async for output in session.compute(chunk)] == ["length"]
        rest = [output async for output in session.compute(Chunk(expected[6:7], params(40)), last=True)]
        await session.aclose()
        assert [token for output in rest for token in output.ids] == expected[7:]


async def test_stop_conditions_count_the_other_engines_tokens(decode: Engine) -> None:
    prompt, greedy = decode.tokens(50, "stop"), Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    expected = await decode.reference(prompt, greedy)
    at = next(i for i in range(8, 24) if expected[i] not in expected[:i])
    stopping = Sampling(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=[expected[at]])
    run = await decode.decode(prompt, stopping, [expected[:5]])
    assert run.ids == expected[5 : at + 1]
    assert (run.finished.reason, run.finished.stop_reason) == ("stop", expected[at])
    short = Sampling(max_tokens=7, temperature=0, ignore_eos=True)
    run = await decode.decode(prompt, short, [expected[:3]], eager=[])
    assert (run.ids, run.finished.reason) == (expected[3:7], "length")
    run = await decode.decode(prompt, short, [expected[3:7]], eager=expected[:3])
    assert (run.ids, run.finished.reason) == ([], "length")


async def test_prefill_tells_whether_token_0_ends_the_request(prefill: Engine) -> None:
    prompt = prefill.tokens(40, "token 0")
    first = (await prefill.prefill(prompt, Sampling(max_tokens=9, temperature=0))).ids
    stopping = Sampling(max_tokens=9, temperature=0, stop_token_ids=first)
    run = await prefill.prefill(prompt, stopping)
    assert (run.ids, run.finished.reason, run.finished.stop_reason) == (first, "stop", first[0])
    run = await prefill.prefill(prompt, Sampling(max_tokens=1, temperature=0))
    assert (run.ids, run.finished.reason) == (first, "length")
    run = await prefill.prefill(prompt, Sampling(max_tokens=9, temperature=0))
    assert (run.ids, run.finished.reason) == (first, None)


async def test_context_length_holds_over_all_chunks(decode: Engine) -> None:
    greedy = Sampling(max_tokens=100, temperature=0, ignore_eos=True)
    prompt = decode.tokens(1015, "context")
    run = await decode.decode(prompt, greedy, [[1000, 1001]])
    assert (len(run.ids), run.finished.reason) == (7, "length")
    with pytest.raises(EngineRejectedError, match="leave no room in the context of 1024"):
        await decode.decode(prompt, greedy, [list(range(1000, 1012)), [5]])
    with pytest.raises(EngineRejectedError, match="leave no room"):
        await decode.decode(decode.tokens(1024), greedy, [[]])


async def test_bad_requests_are_refused_in_vllms_words(decode: Engine) -> None:
    async def refused(match: str, sampling: Sampling, prompt: list[int] | None = None) -> None:
        with pytest.raises(EngineRejectedError, match=match) as error:
            await decode.decode(prompt or decode.tokens(20), sampling, [[1]])
        assert error.value.status == 400

    await refused("temperature must be", Sampling(max_tokens=4, temperature=-1))
    await refused("top_p must be in", Sampling(max_tokens=4, top_p=1.5))
    await refused("min_tokens must be less than", Sampling(max_tokens=4, min_tokens=5))
    await refused("vocab", Sampling(max_tokens=4), [1, 2, 10_000_000])
    with pytest.raises(EngineRejectedError, match="vocab"):
        await decode.decode(decode.tokens(20), Sampling(max_tokens=4), [[10_000_000], [1]])


async def test_min_tokens_beyond_a_chunk(decode: Engine) -> None:
    sampling = Sampling(max_tokens=24, min_tokens=20, temperature=0)
    prompt = decode.tokens(45, "min")
    expected = await decode.reference(prompt, sampling)
    assert (await decode.decode(prompt, sampling, [expected[:4], expected[4:6]])).ids == expected[6:]


async def test_a_cancelled_session_leaves_nothing(decode: Engine) -> None:
    import asyncio

    prompt = decode.tokens(60, "cancel")
    request = Open(sid="cancel", mode="decode", prompt=prompt, sampling=Sampling(max_tokens=500, ignore_eos=True))
    for chunks in ([], [Extend("cancel", [1, 2])], [Takeover("cancel", [1])]):
        run = Run()

        async def feed(chunks: list[Extend | Takeover] = chunks):
            for chunk in chunks:
                yield chunk
            await asyncio.Event().wait()

        task = asyncio.create_task(decode.backend.run(request, feed(), run.events.append))
        async with asyncio.timeout(30):
            while len(run.events) < 1 + len(chunks):  # noqa: ASYNC110 - emit is a plain callback
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await decode.forget()  # succeeds only when no request holds a block
        assert decode.backend.load().running == 0
