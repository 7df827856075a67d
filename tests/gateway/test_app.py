"""Answers, whole and streamed."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_generator import FakeGenerator, Script, batches

from pdrelay.errors import DepotUnavailableError, EngineRejectedError, EngineUnavailableError, PlacementError
from pdrelay.gateway.app import build_app
from pdrelay.gateway.base import Finish, InstanceState
from pdrelay.gateway.text import Text

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EOS = 2
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (COMPLETION, {"prompt": "hi"}),
]
both = pytest.mark.parametrize(("path", "body"), REQUESTS)


def events(response: httpx.Response) -> list[Any]:
    """The data of every event, the last of which must be [DONE]."""
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def piece(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.fixture
def words(text: Text, generator: FakeGenerator) -> str:
    """Has the generator say this, in three batches and with EOS."""
    said = "the quick 你好 fox"
    ids = text.encode(said, add_special_tokens=False)
    generator.play(ids[:1], ids[1:5], [*ids[5:], EOS])
    return said


async def test_a_whole_chat_answer(client: httpx.AsyncClient, words: str, generator: FakeGenerator) -> None:
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
    answer = response.json()
    request = generator.requests[0]
    output = len(generator.streams[0].sent)
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("pdrelay-")
    assert answer == {
        "id": request.request_id,
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": words, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": output,
            "total_tokens": len(request.prompt) + output,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert request.request_id.startswith("chatcmpl-")
    assert response.headers["x-request-id"] == request.request_id


async def test_a_whole_completion(client: httpx.AsyncClient, words: str) -> None:
    answer = (await client.post(COMPLETION, json={"prompt": "hi"})).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": words, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


@both
async def test_a_stream(client: httpx.AsyncClient, words: str, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert "".join(map(piece, chunks)) == words
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk or "pdrelay" in chunk for chunk in chunks)
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {}


@both
async def test_usage_comes_last(client: httpx.AsyncClient, words: str, path: str, body: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await client.post(path, json=body | options))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    whole = (await client.post(path, json=body)).json()
    assert last["usage"] == whole["usage"]


async def test_continuous_usage(client: httpx.AsyncClient, words: str, generator: FakeGenerator) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(await client.post(COMPLETION, json={"prompt": "hi"} | options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == [1, 5, len(generator.streams[0].sent), len(generator.streams[0].sent)]


@both
@pytest.mark.parametrize("usage", [False, True])
async def test_a_traced_stream(
    client: httpx.AsyncClient, words: str, path: str, body: dict[str, Any], usage: bool
) -> None:
    options: dict[str, Any] = {"stream": True, "pdrelay": {"trace": True}}
    if usage:
        options["stream_options"] = {"include_usage": True}
    *chunks, last = events(await client.post(path, json=body | options))
    marks = [chunk["pdrelay"] for chunk in chunks if "pdrelay" in chunk]
    assert marks == [
        {"tier": "prefill", "index": 0}, {"tier": "relay", "index": 1}, {"tier": "main", "index": 5}
    ]  # fmt: skip
    assert last["pdrelay"]["pipeline"] == "p_rld_md"
    assert last["pdrelay"]["second_token"] is None
    assert len(last["pdrelay"]["token_ids"]) > 5
    assert ("usage" in last) == usage


async def test_a_traced_body(client: httpx.AsyncClient, words: str) -> None:
    answer = (await client.post(COMPLETION, json={"prompt": "hi", "pdrelay": {"trace": True}})).json()
    assert answer["pdrelay"]["wan_bytes"] == 1000
    assert "pdrelay" not in (await client.post(COMPLETION, json={"prompt": "hi"})).json()


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text, path: str, body: dict[str, Any], stream: bool
) -> None:
    ids = text.encode("the quick brown fox", add_special_tokens=False)
    never = asyncio.Event()
    generator.script = Script([*batches(*([token] for token in ids)), never])
    response = await client.post(path, json=body | {"stream": stream, "stop": [" fox"]})
    chunks = events(response) if stream else [response.json()]
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", " fox")
    said = "".join(map(piece, chunks)) if stream else last.get("text") or last["message"]["content"]
    assert said == "the quick brown"
    assert generator.streams[0].closed.is_set()


async def test_the_length_limit(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.play([60], [61, 62], finish=Finish("length", None))
    answer = (await client.post(COMPLETION, json={"prompt": "hi", "max_tokens": 3})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


FAILURES = [
    (PlacementError("decode: m0 is down since 12:00"), 503, "service_unavailable", "m0 is down"),
    (EngineRejectedError("no such thing", 429), 429, "invalid_request_error", "no such thing"),
    (EngineRejectedError("engine broke", 500), 500, "server_error", "engine broke"),
    (EngineUnavailableError("m0 is gone"), 502, "service_unavailable", "m0 is gone"),
    (DepotUnavailableError("no depot"), 503, "service_unavailable", "no depot"),
    (KeyError("secret"), 500, "server_error", "Internal server error"),
]
failures = pytest.mark.parametrize(("error", "status", "kind", "fragment"), FAILURES)


@failures
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_have_their_status(
    client: httpx.AsyncClient, generator: FakeGenerator, error: Exception, status: int, kind: str, fragment: str,
    at_once: bool, stream: bool,
) -> None:  # fmt: skip
    generator.refusal = error if at_once else None
    generator.script = Script([error])
    response = await client.post(COMPLETION, json={"prompt": "hi", "stream": stream})
    detail = response.json()["error"]
    assert (response.status_code, detail["type"]) == (status, kind)
    assert fragment in detail["message"]
    assert all(stream.closed.is_set() for stream in generator.streams)


@failures
async def test_failures_in_the_middle_are_an_event(
    client: httpx.AsyncClient, generator: FakeGenerator, error: Exception, status: int, kind: str, fragment: str
) -> None:
    generator.script = Script([*batches([60], [61]), error])
    response = await client.post(COMPLETION, json={"prompt": "hi", "stream": True})
    assert response.status_code == 200
    *chunks, last = events(response)
    assert len(chunks) == 2
    assert last["error"]["type"] == kind
    assert fragment in last["error"]["message"]
    assert generator.streams[0].closed.is_set()
    assert f'status="{status}"' in (await client.get("/metrics")).text


async def test_models(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert (await client.get("/v1/models/tiny")).json() == card
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_adapters_are_models(generator: FakeGenerator, text: Text) -> None:
    app = build_app(generator, text, "tiny", adapters=["pirate"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("pirate", "tiny")]
        assert (await client.get("/v1/models/pirate")).json() == cards[1]
        for model in ("pirate", "tiny", None):
            generator.play([5, 6], finish=Finish("length", None))
            body = {"prompt": "hello", "max_tokens": 2} | ({"model": model} if model else {})
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["model"] == (model or "tiny")
        assert [request.lora for request in generator.requests] == ["pirate", "", ""]
        missing = await client.post("/v1/completions", json={"prompt": "hello", "model": "poet"})
        assert "serves 'tiny', 'pirate'" in missing.json()["error"]["message"]


async def test_health(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.json()[0] == {
        "instance": "p0", "cluster": "a", "roles": ["prefill"], "healthy": True, "detail": "", "alarm": "",
    }  # fmt: skip
    generator.states[0] = InstanceState("p0", "a", ["prefill"], False, "connection refused")
    response = await client.get("/health")
    assert (response.status_code, response.json()[0]["detail"]) == (503, "connection refused")
    generator.states.append(InstanceState("p1", "a", ["prefill"], True, ""))
    assert (await client.get("/health")).status_code == 200
    generator.states[1] = InstanceState("r0", "a", ["relay"], False, "connection refused")
    assert (await client.get("/health")).status_code == 200  # what has no relay goes P-MD
    generator.states[1] = InstanceState("r0", "a", ["relay"], True, "")
    generator.states[2] = InstanceState("m0", "a", ["decode"], False, "connection refused")
    assert (await client.get("/health")).status_code == 200  # a relay serves alone
    generator.states[1] = InstanceState("r0", "a", ["relay"], False, "connection refused")
    assert (await client.get("/health")).status_code == 503
    generator.states.clear()
    assert (await client.get("/health")).status_code == 503


async def test_metrics(client: httpx.AsyncClient, words: str, generator: FakeGenerator) -> None:
    await client.post(COMPLETION, json={"prompt": "hi", "stream": True})
    await client.post(COMPLETION, json={"prompt": "hi", "n": 0})
    shown = (await client.get("/metrics")).text
    assert "_created" not in shown
    total = len(generator.streams[0].sent)
    for line in (
        'requests_total{endpoint="completion",pipeline="p_rld_md",status="200"} 1.0',
        'requests_total{endpoint="completion",pipeline="none",status="400"} 1.0',
        "requests_running 0.0",
        f"prompt_tokens_total {len(generator.requests[0].prompt)}.0",
        'generation_tokens_total{tier="prefill"} 1.0',
        'generation_tokens_total{tier="relay"} 4.0',
        f'generation_tokens_total{{tier="main"}} {total - 5}.0',
        "wan_bytes_total 1000.0",
        "wan_saved_bytes_total 200.0",
        'handoffs_total{mode="one_shot"} 1.0',
        "time_to_first_token_seconds_count 1.0",
        "time_to_second_token_seconds_count 1.0",
        "inter_token_latency_seconds_count 2.0",
        "handoff_gap_seconds_count 1.0",
        "e2e_request_latency_seconds_count 1.0",
    ):
        assert f"pdrelay_gateway_{line}\n" in shown
