"""What is wrong with a request is said before any engine works: status, field, and how to put it right."""

from typing import Any

import httpx
import msgspec
import pytest
from fake_generator import FakeGenerator

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def error_of(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    response = await client.post(path, content=content)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error


BODIES = [
    (b"", None, "not valid JSON"),
    (b'{"messages": [', None, "not valid JSON"),
    (b'{"messages": "\xff"}', None, "not valid JSON"),
    (b'{"temperature": NaN}', None, "not valid JSON"),
    (b'{"temperature": 1e999}', None, "not valid JSON"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b"[]", None, "must be a JSON object, got an array"),
    (b'"hi"', None, "must be a JSON object, got a string"),
    (b"null", None, "must be a JSON object, got null"),
]

BOTH = [
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ({"zzz": 1}, "zzz", "Unknown parameter: 'zzz'. Remove it."),
    ({"max_tokens": "8"}, "max_tokens", "Expected int, got str"),
    ({"max_tokens": 8.5}, "max_tokens", "Expected int, got float"),
    ({"max_tokens": True}, "max_tokens", "Expected int, got bool"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
    ({"max_tokens": 10**30}, "max_tokens", "maximum context length is 256 tokens"),
    ({"min_tokens": -1}, "min_tokens", "at least 0, got -1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens=8, got 9"),
    ({"temperature": -0.1}, "temperature", "in [0, 2], got -0.1"),
    ({"temperature": 2.1}, "temperature", "in [0, 2], got 2.1"),
    ({"temperature": "hot"}, "temperature", "Expected float, got str"),
    ({"top_p": 0}, "top_p", "in (0, 1], got 0.0"),
    ({"top_p": 1.1}, "top_p", "in (0, 1]"),
    ({"top_k": -2}, "top_k", "at least 1, or 0 or -1"),
    ({"min_p": 1.5}, "min_p", "in [0, 1]"),
    ({"seed": 2**63}, "seed", "64-bit integer"),
    ({"presence_penalty": 2.5}, "presence_penalty", "in [-2, 2]"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "in [-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "key 'x', keys must be token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"320": 1}}, "logit_bias", "has token id 320, ids of this model are 0 to 319"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "in [-100, 100], got 101"),
    ({"logit_bias": [1]}, "logit_bias", "Expected object, got array"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 strings, got 5"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": 3}, "stop", "got int"),
    ({"stop": ["a", 3]}, "stop[1]", "Expected str, got int"),
    ({"stop_token_ids": [1, 320]}, "stop_token_ids", "has token id 320"),
    ({"stream": "yes"}, "stream", "Expected bool, got str"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown parameter"),
    ({"cache_salt": "s" * 1025}, "cache_salt", "at most 1024 characters"),
    ({"n": 0}, "n", "at least 1, got 0"),
    ({"n": True}, "n", "Expected int, got bool"),
    ({"n": 129}, "n", "At most 128 choices"),
    ({"best_of": 2}, "best_of", "best_of=2 is not supported"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream=true"),
    ({"prompt_logprobs": 2**20}, "prompt_logprobs", "too much for a prompt"),
    ({"echo": 1}, "echo", "Expected bool"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids", "has token id 320"),
    ({"bad_words": [""]}, "bad_words", "must not be empty"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "expected one of 'text', 'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "needs json_schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of json"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "Unknown parameter"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one constraint, got"),
    (
        {"guided_json": {}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "got guided_json, response_format.json_object",
    ),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    ({"pdrelay": {"tracing": True}}, "pdrelay.tracing", "Unknown parameter"),
    ({"pdrelay": {"trace": 1}}, "pdrelay.trace", "Expected bool"),
    ({"pdrelay": {"pipeline": "p_md"}}, "pdrelay.pipeline", "debug control"),
    ({"pdrelay": {"handoff_mode": "one_shot"}}, "pdrelay.handoff_mode", "debug control"),
    ({"pdrelay": {"handoff_at": 3}}, "pdrelay.handoff_at", "debug = true"),
]

CHAT_ONLY = [
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "Expected array, got str"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
    ({"messages": [*MESSAGES, {"role": "king", "content": "x"}]}, "messages[1].role", "expected one of 'system'"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "is required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no healthy instance has one"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "no healthy instance has one"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {}}]},
        "messages[0].function_call",
        "send tool_calls",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "no healthy instance has one"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "only content",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got int"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "you requested 300 output tokens"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt=false"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not contain 'tokenize'"),
    ({"logprobs": 1}, "logprobs", "Expected bool, got int"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at least 0"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"prompt": "hi"}, "prompt", "Unknown parameter"),
]

COMPLETION_ONLY = [
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"prompt": None}, "prompt", "prompt is required"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": 3}, "prompt", "got int"),
    ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "At most 128 choices"),
    ({"logprobs": True}, "logprobs", "Expected int, got bool"),
    ({"logprobs": -1}, "logprobs", "at least 0, got -1"),
    ({"prompt": [1, "a"]}, "prompt", "mixes token ids and texts"),
    ({"prompt": [5, 320]}, "prompt", "has token id 320, ids of this model are 0 to 319"),
    ({"prompt": [-1]}, "prompt", "has token id -1"),
    ({"messages": MESSAGES}, "messages", "Unknown parameter"),
]

CASES = [
    *((CHAT, body, param, fragment) for body, param, fragment in BODIES),
    *((CHAT, {"messages": MESSAGES} | extra, param, fragment) for extra, param, fragment in BOTH + CHAT_ONLY),
    *((COMPLETION, {"prompt": "hi"} | extra, param, fragment) for extra, param, fragment in BOTH + COMPLETION_ONLY),
]


@pytest.mark.parametrize(("path", "body", "param", "fragment"), CASES)
async def test_bad_request(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str, body: Any, param: str | None, fragment: str
) -> None:
    status, error = await error_of(client, path, body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert fragment in error["message"]
    assert generator.requests == []


@pytest.mark.parametrize(("path", "rest"), [(CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "hi"})])
async def test_a_wrong_model_is_not_found(client: httpx.AsyncClient, path: str, rest: dict[str, Any]) -> None:
    status, error = await error_of(client, path, {"model": "gpt-5", **rest})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'gpt-5' does not exist. This server serves 'tiny'." in error["message"]


async def test_a_prompt_beyond_the_context(client: httpx.AsyncClient) -> None:
    status, error = await error_of(client, COMPLETION, {"prompt": [7] * 256})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens" in error["message"]
    assert "contains 256 input tokens" in error["message"]


async def test_prompt_and_output_beyond_the_context(client: httpx.AsyncClient) -> None:
    status, error = await error_of(client, COMPLETION, {"prompt": [7] * 200, "max_tokens": 57})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert (
        "requested 57 output tokens and your prompt contains 200 input tokens, for a total of 257" in error["message"]
    )
    assert "max_tokens to at most 56" in error["message"]


async def test_a_prompt_that_no_depot_holds(client: httpx.AsyncClient) -> None:
    status, error = await error_of(client, COMPLETION, {"prompt": [7] * 201})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "201 input tokens, but the depots of this deployment hold the KV cache of at most 200" in error["message"]


async def test_a_text_far_beyond_the_context_is_not_tokenised(client: httpx.AsyncClient) -> None:
    status, error = await error_of(client, COMPLETION, {"prompt": "x" * 100_000})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "100000 characters" in error["message"]


async def test_a_body_that_is_too_large(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdrelay.gateway.app.MAX_BODY_BYTES", 1 << 20)
    status, error = await error_of(client, COMPLETION, {"prompt": "x" * (1 << 20)})
    assert (status, error["code"]) == (413, "request_too_large")
    assert "larger than 1 MiB" in error["message"]


@pytest.mark.parametrize(
    ("controls", "param", "fragment"),
    [
        ({"pipeline": "p_x"}, "pdrelay.pipeline", "expected one of 'p_md'"),
        ({"handoff_mode": "slow"}, "pdrelay.handoff_mode", "expected one of 'one_shot'"),
        ({"handoff_mode": "catch_up", "pipeline": "p_md"}, "pdrelay.handoff_mode", "needs a relay"),
        ({"handoff_at": 0}, "pdrelay.handoff_at", "at least 1"),
        ({"handoff_at": 3, "pipeline": "p_md"}, "pdrelay.handoff_at", "needs a relay"),
    ],
)
async def test_bad_debug_controls(
    debug_client: httpx.AsyncClient, controls: dict[str, Any], param: str, fragment: str
) -> None:
    status, error = await error_of(debug_client, COMPLETION, {"prompt": "hi", "pdrelay": controls})
    assert (status, error["param"]) == (400, param)
    assert fragment in error["message"]


async def test_unknown_address_and_method(client: httpx.AsyncClient) -> None:
    missing, wrong = await client.get("/v1/embeddings"), await client.get(CHAT)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_template_that_writes_nothing_is_told(
    client: httpx.AsyncClient, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdrelay.gateway.text.Text.render", lambda *_: "")
    status, error = await error_of(client, CHAT, {"messages": MESSAGES})
    assert (status, error["param"]) == (400, "messages")
    assert not generator.requests
