"""Requests that vLLM's serving layer answers: what it is asked, what it is fed, what the client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_generator import FakeGenerator, Script, batches
from test_app import events

from pdrelay.engine.messages import Parsers, Prefilled, Sampling
from pdrelay.engine.serving import Ask, Enough, Feed, FromServing, Generate, Reply, ToServing
from pdrelay.errors import EngineUnavailableError, PlacementError
from pdrelay.gateway.base import Finish, Serving
from pdrelay.gateway.text import Text

CHAT = "/v1/chat/completions"
EOS = 2
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "model": "tiny"}


class FakeLayer:
    """Asks for `choices`, and writes one part of its answer for each feed."""

    def __init__(self, choices: int = 1, *, stream: bool = False, enough_after: int | None = None) -> None:
        self.choices, self.stream, self.enough_after = choices, stream, enough_after
        self.received: list[ToServing] = []
        self.first: list[FromServing] = []  # instead of asking
        self.closed = asyncio.Event()
        self.sampling = Sampling(max_tokens=9, temperature=0, logprobs=1)

    @property
    def feeds(self) -> list[Feed]:
        return [message for message in self.received if isinstance(message, Feed)]

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[FakeLayer]:
        self._inbox: asyncio.Queue[ToServing] = asyncio.Queue()
        try:
            yield self
        finally:
            self.closed.set()

    async def send(self, message: ToServing) -> None:
        self.received.append(message)
        self._inbox.put_nowait(message)

    async def messages(self) -> AsyncIterator[FromServing]:
        assert isinstance(await self._inbox.get(), Ask)
        for message in self.first or [Generate(f"{i}_x", [5, 6, 7], self.sampling) for i in range(self.choices)]:
            yield message
        running = self.choices
        while running:
            feed = await self._inbox.get()
            assert isinstance(feed, Feed)
            if self.stream:
                yield Reply(stream=True, data=b"data: " + json.dumps({"ids": feed.ids}).encode() + b"\n\n")
            enough = self.enough_after is not None and len(self.feeds) >= self.enough_after
            if enough:
                yield Enough(feed.choice)
            running -= enough or feed.reason is not None
        if self.stream:
            yield Reply(stream=True, data=b"data: [DONE]\n\n")
            yield Reply(stream=True, last=True)
        else:
            yield Reply(data=json.dumps({"object": "chat.completion"}).encode(), last=True)


@pytest.fixture
def install(generator: FakeGenerator) -> Callable[..., FakeLayer]:
    def install(parsers: Parsers | None = None, **options: Any) -> FakeLayer:
        layer = FakeLayer(**options)
        generator.layer = Serving("p0", parsers or Parsers(tools="hermes"), layer.connect)
        return layer

    return install


async def test_the_layer_is_asked_and_fed(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer]
) -> None:
    layer = install()
    generator.play([60], [61, 62], [63, EOS], finish=Finish("stop", None))
    extra = {"cache_salt": "s", "user": "u", "temperature": 0.5, "guided_regex": "a+", "pdrelay": {"max_gap_ms": 9}}
    response = await client.post(CHAT, json=BODY | extra)
    assert response.json() == {"object": "chat.completion"}
    asked = layer.received[0]
    assert isinstance(asked, Ask)
    (request,) = generator.requests
    assert json.loads(asked.body) == {
        **BODY, "temperature": 0.5, "structured_outputs": {"regex": "a+"},
        "request_id": request.request_id.removeprefix("chatcmpl-"),
    }  # fmt: skip
    assert (request.prompt, request.sampling, request.cache_salt) == ([5, 6, 7], layer.sampling, "s")
    assert request.max_gap == pytest.approx(0.009)
    assert [(feed.ids, feed.reason) for feed in layer.feeds] == [([60], None), ([61, 62], None), ([63, EOS], "stop")]
    assert layer.feeds[0].prefilled == Prefilled(cached_tokens=3)
    assert [row.ids[0] for feed in layer.feeds for row in feed.logprobs.rows()] == [60, 61, 62, 63, EOS]
    assert response.headers["x-request-id"] == request.request_id
    assert generator.streams[0].closed.is_set()
    assert layer.closed.is_set()


async def test_a_stream_is_passed_on(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer]
) -> None:
    install(stream=True)
    generator.play([60], [61, EOS])
    response = await client.post(CHAT, json=BODY | {"stream": True, "pdrelay": {"trace": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert chunks == [{"ids": [60]}, {"ids": [61, EOS]}]
    assert last["pdrelay"]["pipeline"] == "p_rld_md"
    assert last["choices"] == []
    install()
    body = (await client.post(CHAT, json=BODY | {"pdrelay": {"trace": True}})).json()
    assert body["pdrelay"]["main_instance"] == "m0"


async def test_what_is_enough_ends_the_request(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer]
) -> None:
    install(enough_after=2)
    generator.script = Script([*batches([60], [61]), asyncio.Event()])
    assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert generator.streams[0].closed.is_set()


async def test_several_choices_share_one_prefill(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer]
) -> None:
    layer = install(choices=3)
    gate = asyncio.Event()
    generator.script = Script([gate, *batches([60], [61, EOS])])
    generator.cached_tokens = [3, 7, 7]
    task = asyncio.create_task(client.post(CHAT, json=BODY | {"n": 3}))
    await asyncio.wait_for(generator.started.wait(), 5)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(generator.requests) == 1
    gate.set()
    assert (await task).status_code == 200
    assert sorted(feed.choice for feed in layer.feeds if feed.reason) == ["0_x", "1_x", "2_x"]
    assert len({request.request_id for request in generator.requests}) == 3
    # What later choices find is what the first has left there.
    assert {feed.prefilled.cached_tokens for feed in layer.feeds if feed.prefilled} == {3}
    assert "prompt_tokens_total 3.0" in (await client.get("/metrics")).text


REFUSALS: list[tuple[list[FromServing], int, str]] = [
    (
        [Reply(status=400, data=b'{"error": {"message": "no such tool", "param": "tools", "code": 400}}', last=True)],
        400,
        "no such tool",
    ),
    (
        [Reply(stream=True, data=b'data: {"error": {"message": "bad grammar", "code": 400, "param": null}}\n\n')],
        400,
        "bad grammar",
    ),
    ([Generate("x", [5] * 201, Sampling(max_tokens=1))], 400, "at most 200"),
]


@pytest.mark.parametrize(("first", "status", "fragment"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_their_status(
    client: httpx.AsyncClient, install: Callable[..., FakeLayer], first: list[FromServing], status: int, fragment: str,
    stream: bool,
) -> None:  # fmt: skip
    layer = install(stream=stream)
    layer.first = first
    response = await client.post(CHAT, json=BODY | {"stream": stream})
    assert response.status_code == status
    assert fragment in response.json()["error"]["message"]


@pytest.mark.parametrize("early", [True, False])
async def test_failures_of_the_pipeline_reach_the_client(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer], early: bool
) -> None:
    layer, gate = install(stream=True), asyncio.Event()
    generator.script = Script([*([] if early else batches([60])), gate, EngineUnavailableError("m0 is gone")])
    task = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": True}))
    while not (layer.received if early else layer.feeds):  # noqa: ASYNC110 - pytest's timeout bounds it
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    response = await task
    assert response.status_code == (502 if early else 200)
    error = response.json()["error"] if early else events(response)[-1]["error"]
    assert "m0 is gone" in error["message"]
    assert layer.closed.is_set()


async def test_a_client_that_leaves_ends_both_sides(
    client: httpx.AsyncClient, generator: FakeGenerator, install: Callable[..., FakeLayer]
) -> None:
    layer = install()
    generator.script = Script([*batches([60]), asyncio.Event()])
    asking = asyncio.create_task(client.post(CHAT, json=BODY))
    while not layer.feeds:  # noqa: ASYNC110 - pytest's timeout bounds it
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert layer.closed.is_set()
    assert generator.streams[0].closed.is_set()


async def test_a_layer_that_is_down_is_said(
    client: httpx.AsyncClient, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down() -> None:
        raise PlacementError("no healthy instance has a serving layer: p0 (a) is down: refused")

    monkeypatch.setattr(generator, "serving", down)
    response = await client.post(CHAT, json=BODY)
    assert (response.status_code, "p0 (a) is down" in response.json()["error"]["message"]) == (503, True)


@pytest.mark.parametrize(
    ("extra", "parsers", "served"),
    [
        ({}, Parsers(tools="hermes"), False),
        ({"tools": [], "tool_choice": "none"}, Parsers(tools="hermes"), False),
        ({}, Parsers(reasoning="qwen3"), True),
        ({"reasoning_effort": "low"}, Parsers(), True),
        ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "x"}]}, Parsers(), True),
        ({"messages": [{"role": "assistant", "tool_calls": [{}], "content": None}]}, Parsers(), True),
    ],
)
async def test_plain_chats_stay_in_the_gateway(
    client: httpx.AsyncClient, generator: FakeGenerator, text: Text, install: Callable[..., FakeLayer],
    extra: dict[str, Any], parsers: Parsers, served: bool,
) -> None:  # fmt: skip
    layer = install(parsers)
    generator.play([60], [EOS])
    body = {"messages": BODY["messages"]} | extra
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert bool(layer.received) == served
