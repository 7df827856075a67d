"""A session whose output is handed over in chunks equals the uninterrupted run, token for token, in float32."""

from __future__ import annotations

import pytest
from engines import Engine, Run, at_once

from pdrelay.engine.messages import Extend, Open, Sampling, StructuredOutput, Takeover
from pdrelay.errors import EngineError, EngineRejectedError

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


async def test_handed_over_output_equals_the_uninterrupted_run(decode: Engine) -> None:
    async def check(name: str) -> None:
        sampling, prompt = SAMPLINGS[name], decode.tokens(53, name)
        expected = await decode.reference(prompt, sampling)
        whole = await decode.decode(prompt, sampling, [expected[:7], expected[7:12], expected[12:13]])
        assert whole.ids == expected[13:], name
        # What the engine would have said itself at each seam.
        assert whole.predictions == [expected[0], expected[7], expected[12]], name

    await at_once(*map(check, SAMPLINGS))


async def test_eager_tokens_are_output_tokens(decode: Engine) -> None:
    async def check(name: str) -> None:
        sampling, prompt = SAMPLINGS[name], decode.tokens(70, name)
        expected = await decode.reference(prompt, sampling)
        for _ in range(2):  # the second finds prompt and eager tokens in the prefix cache
            whole = await decode.decode(prompt, sampling, [expected[9:11]], eager=expected[:9])
            assert [*whole.predictions, *whole.ids] == [expected[9], *expected[11:]], name

    await at_once(*map(check, SAMPLINGS))


async def test_taking_over_without_a_new_token(decode: Engine) -> None:
    async def check(name: str) -> None:
        sampling, prompt = SAMPLINGS[name], decode.tokens(64, f"nothing new {name}")
        expected = await decode.reference(prompt, sampling)
        runs = await at_once(
            decode.decode(prompt, sampling, [[]], eager=expected[:5]),
            decode.decode(prompt, sampling, [expected[:3], [], []]),
            decode.decode(prompt, sampling, [[]]),
        )
        assert [run.ids for run in runs] == [expected[5:], expected[3:], expected], name

    await at_once(*map(check, ("greedy", "seeded")))


async def test_a_seeded_prompt_in_chunks_equals_one_in_a_single_step(prefill: Engine, decode: Engine) -> None:
    prompt, sampling = decode.tokens(150, "seed"), SAMPLINGS["seeded"]
    expected = await decode.reference(prompt, sampling)
    assert await prefill.reference(prompt, sampling) == expected
    await prefill.forget()
    assert (await prefill.prefill(prompt, sampling)).ids == expected[:1]


GRAMMARS = {
    "regex": StructuredOutput(regex=r"[a-z]{3}-[0-9]{12}-[A-Z]{8}", reasoning_ended=True),
    "schema": StructuredOutput(
        json='{"type": "object", "properties": {"n": {"enum": [10, 20]}, "on": {"enum": ["yes", "no"]}}, '
        '"required": ["n", "on"], "additionalProperties": false}',
        disable_any_whitespace=True,
        reasoning_ended=True,
    ),
    "choice": StructuredOutput(choice=["a river in the north", "a river in the south"], reasoning_ended=True),
}


async def test_prompt_and_takeover_in_one_pass(decode: Engine) -> None:
    async def check(name: str) -> None:
        sampling, prompt = SAMPLINGS[name], decode.tokens(61, name)
        expected = await decode.reference(prompt, sampling)

        async def take_over(known: int) -> None:
            sid = f"once {name} {known}"
            request = Open(sid=sid, mode="decode", prompt=prompt, sampling=sampling, takes_over=True)
            run = await decode.run(request, Takeover(sid, expected[:known]))
            assert run.ids == expected[known:], name
            assert run.predictions == [None], name

        await at_once(*map(take_over, (0, 1, 9)))

    await at_once(*map(check, SAMPLINGS))
    request = Open(sid="once", mode="decode", prompt=[5, 6], sampling=SAMPLINGS["greedy"], takes_over=True)
    with pytest.raises(EngineRejectedError, match="must begin with Takeover"):
        await decode.run(request, Extend(request.sid, [1]))


async def test_a_grammar_goes_on_where_the_other_engine_stopped(decode: Engine) -> None:
    """Also when its end has come, and whatever the engine predicted at the end of each chunk.

    This small model may fill JSON with white space up to the limit.
    """

    async def check(name: str) -> None:
        sampling = Sampling(max_tokens=40, temperature=0, structured=GRAMMARS[name])
        prompt = decode.tokens(40, name)
        expected = await decode.reference(prompt, sampling)
        assert len(expected) > 4, name

        async def hand_over(seam: int) -> None:
            told = [expected[:1], expected[1:seam], expected[seam:-1]] if seam > 1 else [expected[:1]]
            known = sum(map(len, told))
            run = await decode.decode(prompt, sampling, told)
            assert run.ids == expected[known:], name
            assert run.finished.reason == ("stop" if len(expected) < 40 else "length"), name
            assert (await decode.decode(prompt, sampling, [[]], eager=expected[:seam])).ids == expected[seam:], name

        await at_once(*map(hand_over, (1, 3, len(expected) - 1)))

    await at_once(*map(check, GRAMMARS))


async def test_tokens_that_the_grammar_forbids_end_the_session(decode: Engine) -> None:
    sampling = Sampling(max_tokens=40, temperature=0, structured=GRAMMARS["regex"])
    prompt = decode.tokens(40, "regex")
    with pytest.raises(EngineError, match="ended the request: error"):
        await decode.decode(prompt, sampling, [[1000, 1001]])
    assert await decode.reference(prompt, sampling)  # the engine lives


async def test_a_bad_grammar_is_refused(decode: Engine) -> None:
    sampling = Sampling(max_tokens=4, structured=StructuredOutput(regex="(("))
    with pytest.raises(EngineRejectedError) as error:
        await decode.decode(decode.tokens(20), sampling, [[1]])
    assert error.value.status == 400


async def test_log_probabilities_are_those_of_the_uninterrupted_run(prefill: Engine, decode: Engine) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.8, seed=5, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    prompt = decode.tokens(53, "logprobs")
    whole, first = await at_once(decode.decode(prompt, sampling, [[]]), prefill.prefill(prompt, sampling))
    handed = await decode.decode(prompt, sampling, [whole.ids[:1], whole.ids[1:4], whole.ids[4:5]])
    assert [len(row.ids) for row in whole.rows] == [4] * 12
    assert [row.ids[0] for row in whole.rows] == whole.ids
    for told, row in zip(whole.rows, [*first.rows, *whole.rows[1:5], *handed.rows], strict=True):
        assert list(row.ids) == list(told.ids)
        assert row.values == pytest.approx(told.values, abs=1e-4)
    assert [row.ids[0] for row in first.prompt_rows] == prompt[1:]
    assert all(len(row.ids) == 2 and row.rank >= 1 for row in first.prompt_rows)


async def test_a_stop_token_that_was_only_predicted_is_no_reason(decode: Engine) -> None:
    prompt, greedy = decode.tokens(50, "stop"), Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    expected = await decode.reference(prompt, greedy)
    other = next(token for token in range(1000, 2000) if token != expected[3])
    sampling = Sampling(max_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[expected[3]])
    run = await decode.decode(prompt, sampling, [expected[:3], [other]])
    assert (run.predictions[1], run.finished.reason, run.finished.stop_reason) == (expected[3], "length", None)


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
