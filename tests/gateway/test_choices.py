"""Several choices, log probabilities, echoes, token ids, structured output: the same whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_generator import FakeGenerator, Script, batches
from test_app import events

from pdrelay.engine.messages import StructuredOutput
from pdrelay.errors import EngineUnavailableError
from pdrelay.gateway.base import Finish
from pdrelay.gateway.text import Text

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (COMPLETION, {"prompt": "hi"}),
]
both = pytest.mark.parametrize(("path", "body"), REQUESTS)
EOS = 2
SAID = "the 你好 😀 fox"


@pytest.fixture
def said(text: Text, generator: FakeGenerator) -> list[int]:
    """Has the generator say SAID in three batches, and EOS."""
    ids = text.encode(SAID, add_special_tokens=False)
    generator.play(ids[:1], ids[1:5], [*ids[5:], EOS])
    return [*ids, EOS]


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, put together again."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(await client.post(path, json=body | {"stream": True})):
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "token_ids": []})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            for key, values in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(key, []).extend(values)
    return [choices[index] for index in sorted(choices)]


async def test_log_probabilities_of_a_chat(client: httpx.AsyncClient, said: list[int], text: Text) -> None:
    body = REQUESTS[0][1] | {"logprobs": True, "top_logprobs": 2}
    (choice,) = (await whole(client, CHAT, body))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-token / 64 for token in said]
    assert "".join(entry["token"] for entry in content) == SAID + "<|im_end|>"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == SAID + "<|im_end|>"
    # The token itself is the first of the likeliest and counts among them.
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(said)
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
    assert content[0]["top_logprobs"][1]["logprob"] == -said[0] / 64 - 1
    assert (await streamed(client, CHAT, body))[0]["logprobs"]["content"] == content
    (plain,) = (await whole(client, CHAT, REQUESTS[0][1] | {"logprobs": True}))["choices"]
    assert all(entry["top_logprobs"] == [] for entry in plain["logprobs"]["content"])


async def test_log_probabilities_of_a_completion(client: httpx.AsyncClient, said: list[int], text: Text) -> None:
    body = {"prompt": "hi", "logprobs": 2}
    (choice,) = (await whole(client, COMPLETION, body))["choices"]
    told = choice["logprobs"]
    assert told["token_logprobs"] == [-token / 64 for token in said]
    assert "".join(told["tokens"]) == SAID + "<|im_end|>"
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(said))]
    assert list(told["top_logprobs"][0].values()) == [-said[0] / 64, -said[0] / 64 - 1]
    assert (await streamed(client, COMPLETION, body))[0]["logprobs"] == told


@both
async def test_tokens_behind_a_stop_string_are_not_told(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text, path: str, body: dict[str, Any]
) -> None:
    ids = text.encode("the quick brown fox", add_special_tokens=False)
    counted = next(n for n in range(len(ids)) if "quick" in text.decode(ids[:n]))
    generator.play(ids)
    body = body | {"stop": "quick", "logprobs": True if path == CHAT else 0, "return_token_ids": True}
    (choice,) = (await whole(client, path, body))["choices"]
    told = choice["logprobs"]["content" if path == CHAT else "tokens"]
    assert (len(told), choice["token_ids"]) == (counted, ids[:counted])
    (again,) = await streamed(client, path, body)
    assert (again["token_ids"], again["logprobs"]) == (ids[:counted], choice["logprobs"])


@both
async def test_several_choices(
    client: httpx.AsyncClient, said: list[int], generator: FakeGenerator, path: str, body: dict[str, Any]
) -> None:
    answer = await whole(client, path, body | {"n": 3, "seed": 5, "temperature": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in generator.requests] == [5, 6, 7]
    assert len({request.request_id for request in generator.requests}) == 3
    prompt = len(generator.requests[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 3 * len(said), "total_tokens": prompt + 3 * len(said),
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip
    choices = await streamed(client, path, body | {"n": 3})
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [(SAID, "stop")] * 3
    assert all(stream.closed.is_set() for stream in generator.streams)


async def test_further_choices_wait_for_the_prompt_to_be_computed(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    gate = asyncio.Event()
    generator.script = Script([gate, *batches([60], [61, EOS])])
    task = asyncio.create_task(client.post(COMPLETION, json={"prompt": "hi", "n": 4}))
    await asyncio.wait_for(generator.started.wait(), 5)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(generator.requests) == 1
    gate.set()
    assert len((await task).json()["choices"]) == 4
    assert len(generator.requests) == 4


async def test_several_prompts(client: httpx.AsyncClient, said: list[int], generator: FakeGenerator) -> None:
    answer = await whole(client, COMPLETION, {"prompt": ["hi", "the quick"], "n": 2, "pdrelay": {"trace": True}})
    prompts = [request.prompt for request in sorted(generator.requests, key=lambda r: r.request_id)]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert len(answer["pdrelay"]["choices"]) == 4


async def test_one_choice_that_fails_ends_all(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = Script([*batches([60]), EngineUnavailableError("m0 is gone")])
    response = await client.post(COMPLETION, json={"prompt": "hi", "n": 3})
    assert response.status_code == 502
    assert "m0 is gone" in response.json()["error"]["message"]
    assert all(stream.closed.is_set() for stream in generator.streams)


@pytest.mark.parametrize("prompt", ["Hello 你好", "ids"])
async def test_an_echo(
    client: httpx.AsyncClient, said: list[int], text: Text, generator: FakeGenerator, prompt: str
) -> None:
    ids = text.encode("Hello 你好", add_special_tokens=True)
    body = {"prompt": ids if prompt == "ids" else prompt, "echo": True, "logprobs": 1}
    (choice,) = (await whole(client, COMPLETION, body))["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "Hello 你好" + SAID
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:] == [-token / 64 for token in [*ids[1:], *said]]
    assert len(told["tokens"]) == len(told["text_offset"]) == len(ids) + len(said)
    (again,) = await streamed(client, COMPLETION, body)
    assert (again["text"], again["logprobs"]) == (choice["text"], told)
    assert generator.requests[-1].sampling.prompt_logprobs == 1
    assert "prompt_token_ids" not in choice
    first, *others = events(await client.post(COMPLETION, json=body | {"stream": True}))
    assert first["choices"][0]["prompt_token_ids"] == ids, "as vLLM streams it"
    assert not any("prompt_token_ids" in part for chunk in others for part in chunk["choices"])


async def test_an_echo_without_an_output(client: httpx.AsyncClient, generator: FakeGenerator, text: Text) -> None:
    generator.play([60], finish=Finish("length", None))
    body = {"prompt": "Hello", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await whole(client, COMPLETION, body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "Hello"
    assert generator.requests[0].sampling.max_tokens == answer["usage"]["completion_tokens"] == 1
    (again,) = await streamed(client, COMPLETION, body)
    assert (again["text"], again["logprobs"]) == ("Hello", choice["logprobs"])


async def test_an_echo_in_a_chat_is_the_message_that_is_continued(client: httpx.AsyncClient, said: list[int]) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "echo": True}
    assert (await whole(client, CHAT, body))["choices"][0]["message"]["content"] == "Sure, " + SAID
    assert (await streamed(client, CHAT, body))[0]["text"] == "Sure, " + SAID
    assert (await whole(client, CHAT, {"messages": messages[:1], "echo": True}))["choices"][0]["message"][
        "content"
    ] == SAID


@both
async def test_log_probabilities_of_the_prompt(
    client: httpx.AsyncClient, said: list[int], text: Text, generator: FakeGenerator, path: str, body: dict[str, Any]
) -> None:
    answer = await whole(client, path, body | {"prompt_logprobs": 2})
    told = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    prompt = generator.requests[0].prompt
    assert told[0] is None
    assert [list(entry) for entry in told[1:]] == [[str(token), str(token + 1)] for token in prompt[1:]]
    assert told[1][str(prompt[1])] == {"logprob": -prompt[1] / 64, "rank": 1, "decoded_token": text.piece(prompt[1])}


@both
async def test_token_ids(
    client: httpx.AsyncClient, said: list[int], generator: FakeGenerator, path: str, body: dict[str, Any]
) -> None:
    body = body | {"return_token_ids": True}
    answer = await whole(client, path, body)
    prompt = generator.requests[0].prompt
    assert answer["choices"][0]["token_ids"] == said
    assert (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"] == prompt
    (again,) = await streamed(client, path, body)
    assert again["token_ids"] == said
    first = events(await client.post(path, json=body | {"stream": True}))[0]
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
STRUCTURED: list[tuple[dict[str, Any], StructuredOutput]] = [
    ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        StructuredOutput(json=json.dumps(SCHEMA)),
    ),
    ({"guided_json": SCHEMA}, StructuredOutput(json=json.dumps(SCHEMA))),
    ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=["a", "b"])),
    (
        {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
        StructuredOutput(json="{}", disable_any_whitespace=True),
    ),
    ({"structured_outputs": {"grammar": "root ::= x"}}, StructuredOutput(grammar="root ::= x")),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        StructuredOutput(structural_tag=json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})),
    ),
]


@both
@pytest.mark.parametrize(("fields", "expected"), STRUCTURED)
async def test_structured_output_in_every_spelling(
    client: httpx.AsyncClient, said: list[int], generator: FakeGenerator, path: str, body: dict[str, Any],
    fields: dict[str, Any], expected: StructuredOutput,
) -> None:  # fmt: skip
    await whole(client, path, body | fields)
    assert generator.requests[0].sampling.structured == expected


@both
async def test_engines_that_send_no_log_probabilities_are_an_error(
    client: httpx.AsyncClient,
    generator: FakeGenerator,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    monkeypatch.setattr("fake_generator.rows", lambda *_: None)
    generator.play([60], [EOS])
    response = await client.post(path, json=body | {"logprobs": True if path == CHAT else 1})
    assert response.status_code == 500
    assert "no log probabilities" in response.json()["error"]["message"]
