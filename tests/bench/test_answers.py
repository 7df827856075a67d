from aiohttp import web
from openai_server import DONE, Step, chunk, final, serving, stream

from pdrelay.bench.answers import Answer, ask, client


async def answer_to(*steps: Step, patience: float = 5.0) -> Answer:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *steps)

    return await answer_of(handler, patience)


async def answer_of(handler, patience: float = 5.0) -> Answer:
    answer = Answer()
    async with serving(handler) as url, client(url, patience=patience) as session:
        await ask(session, "/v1/completions", b"{}", answer)
    return answer


async def test_tokens_are_timed_by_the_count_on_each_chunk():
    answer = await answer_to(chunk("", 0), 0.02, chunk("abc", 3), 0.05, chunk("", 4), final(7, 4), DONE)
    assert (answer.error, answer.tokens, answer.output_tokens) == ("", [3, 4], 4)
    assert (answer.prompt_tokens, answer.cached_tokens) == (7, 2)
    assert answer.moment_of(0) == answer.moment_of(2) == answer.moments[0]
    assert answer.moments[0] - answer.sent >= 0.02
    assert answer.gaps[0] >= 0.045


async def test_token_ids_count_when_usage_does_not():
    answer = await answer_to(chunk("ab", token_ids=[1, 2]), chunk("", token_ids=[3]), DONE)
    assert (answer.error, answer.tokens, answer.output_tokens) == ("", [2, 3], 3)


async def test_without_either_a_chunk_with_text_is_a_token():
    answer = await answer_to(chunk("a"), chunk(""), chunk("b"), final(5, 9), DONE)
    assert (answer.tokens, answer.output_tokens) == ([1, 2], 9)


async def test_a_refusal_says_what_the_server_said():
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    answer = await answer_of(refuse)
    assert (answer.status, answer.error) == (400, "HTTP 400: too long")


async def test_what_came_before_an_end_too_early_is_kept():
    answer = await answer_to(chunk("a", 1), chunk("b", 2))
    assert answer.error == "the stream broke off after 2 tokens"
    assert answer.tokens == [1, 2]


async def test_an_error_in_the_stream_is_told():
    answer = await answer_to(chunk("a", 1), 'data: {"error": {"message": "engine died"}}', DONE)
    assert (answer.error, answer.tokens) == ("the stream says: engine died", [1])


async def test_nonsense_in_the_stream_is_told():
    assert "cannot be read" in (await answer_to("data: {nonsense", DONE)).error


async def test_an_answer_without_a_token_has_failed():
    assert (await answer_to(chunk("", 0), DONE)).error == "the answer has no token"


async def test_silence_ends_the_waiting():
    answer = await answer_to(chunk("a", 1), 5.0, DONE, patience=0.1)
    assert answer.error == "no answer in time, after 1 chunks"
    assert answer.tokens == [1]


async def test_nobody_there():
    answer = Answer()
    async with client("http://127.0.0.1:1") as session:
        await ask(session, "/v1/completions", b"{}", answer)
    assert "ConnectorError" in answer.error
    assert answer.status == 0
