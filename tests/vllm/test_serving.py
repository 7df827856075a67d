"""vLLM's chat endpoint on our pipeline writes what it writes on vLLM's engine, wherever the tokens are handed over."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from engines import MODEL, Engine, at_once
from starlette.datastructures import State
from starlette.websockets import WebSocketDisconnect

from pdrelay.engine.logprobs import pack
from pdrelay.engine.messages import SUBPROTOCOLS, Open, Prefilled, Takeover
from pdrelay.engine.serving import Ask, Enough, Feed, Generate, Reply, decode_to_serving, encode

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Ostia"]}, "age": {"enum": [100, 200]}},
    "required": ["city", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA}}]
THINK_END = 8
BASE: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Tell me about the river."}], "temperature": 0,
    "max_tokens": 60,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "reasoning": {"logit_bias": {str(THINK_END): 14}, "max_tokens": 24, "logprobs": True, "top_logprobs": 2},
    "only reasoning": {"max_tokens": 12},
    "hidden reasoning": {"logit_bias": {str(THINK_END): 14}, "max_tokens": 24, "include_reasoning": False},
    "stop": {"stop": [" river", " the"], "max_tokens": 30, "include_stop_str_in_output": True},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 9, "max_tokens": 10},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chat(decode: Engine) -> Any:
    """vLLM's own chat endpoint on the engine."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = ["--model", decode.llm.vllm_config.model_config.model, "--served-model-name", MODEL]
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, *parsers])
    args.structured_outputs_config.reasoning_parser = "deepseek_r1"
    state = State()
    await init_app_state(decode.llm, state, args, ("generate",))
    return state.openai_serving_chat


class Gateway:
    """Answers Generate with tokens that two sessions make, and takes the replies."""

    def __init__(self, engine: Engine, body: dict[str, Any], seam: int) -> None:
        self._engine, self._seam = engine, seam
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._inbox.put_nowait(encode([Ask(msgspec.json.encode(body))]))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.replies: list[Reply] = []
        self.generated: list[Generate] = []
        self.closed = asyncio.Event()
        self.scope: dict[str, Any] = {"subprotocols": list(SUBPROTOCOLS)}

    async def accept(self, subprotocol: str | None = None) -> None: ...

    async def receive_bytes(self) -> bytes:
        return await self._inbox.get()

    async def send_bytes(self, frame: bytes) -> None:
        for message in msgspec.msgpack.decode(frame, type=list[Generate | Enough | Reply]):
            match message:
                case Generate():
                    self.generated.append(message)
                    self._tasks[message.choice] = asyncio.create_task(self._make(message))
                case Enough(choice):
                    self._tasks[choice].cancel()
                case Reply():
                    self.replies.append(message)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.closed.set()

    async def _make(self, wanted: Generate) -> None:
        """Tokens before the seam from one session, the rest from another that took them over."""
        first = await self._session(wanted, [])
        ids, rows = first.ids, first.rows
        seam = min(self._seam, len(ids))
        if seam < len(ids):
            rest = await self._session(wanted, ids[:seam])
            assert rest.ids == ids[seam:]
            rows = [*rows[:seam], *rest.rows]
        for index, token in enumerate(ids):
            last = index == len(ids) - 1
            await asyncio.sleep(0)
            self._feed(
                Feed(
                    choice=wanted.choice, ids=[token], logprobs=pack([rows[index]]) if rows else None,
                    prefilled=Prefilled(cached_tokens=0) if index == 0 else None,
                    reason=first.finished.reason if last else None,
                    stop_reason=first.finished.stop_reason if last else None,
                )
            )  # fmt: skip

    def _feed(self, feed: Feed) -> None:
        frame = encode([feed])
        assert decode_to_serving(frame) == [feed]
        self._inbox.put_nowait(frame)

    async def _session(self, wanted: Generate, known: list[int]) -> Any:
        sid = f"{wanted.choice}-{len(known)}"
        request = Open(sid=sid, mode="decode", prompt=wanted.prompt, sampling=wanted.sampling, takes_over=True)
        return await self._engine.run(request, Takeover(sid, known))


async def stock(chat: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What vLLM writes by itself: a body, or the chunks of a stream."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    result = await chat.create_chat_completion(ChatCompletionRequest.model_validate(body))
    if not body.get("stream"):
        return [json.loads(result.model_dump_json())]
    return events([event async for event in result])


def events(data: list[str]) -> list[dict[str, Any]]:
    assert data[-1] == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in data[:-1]]


async def serve(engine: Engine, chat: Any, gateway: Gateway) -> None:
    from pdrelay.engine.vllm.serving import ServingLayer

    await ServingLayer(engine.llm, chat).serve(gateway)  # type: ignore[arg-type]  # as much of a WebSocket as it uses


async def served(engine: Engine, chat: Any, body: dict[str, Any], seam: int) -> list[dict[str, Any]]:
    gateway = Gateway(engine, body, seam)
    async with asyncio.timeout(60):
        await serve(engine, chat, gateway)
    *parts, last = gateway.replies
    assert last.last
    if not body.get("stream"):
        return [json.loads(last.data)]
    return events([part.data.decode() for part in parts])


def joined(chunks: list[dict[str, Any]]) -> Any:
    """Choices of a body or a stream without ids and times, which differ from call to call."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found.setdefault(part["index"], {"content": "", "reasoning": "", "calls": "", "logprobs": []})
            message = part.get("message") or part.get("delta") or {}
            for key in ("content", "reasoning"):
                choice[key] += message.get(key) or ""
            for call in message.get("tool_calls") or []:
                function = call.get("function") or {}
                choice["calls"] += (function.get("name") or "") + (function.get("arguments") or "")
            choice["logprobs"] += [
                (entry["token"], round(entry["logprob"], 2), [top["token"] for top in entry["top_logprobs"]])
                for entry in (part.get("logprobs") or {}).get("content") or []
            ]
            choice["finish"] = part.get("finish_reason"), part.get("stop_reason")
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return found, [(each["prompt_tokens"], each["completion_tokens"]) for each in usage]


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("name", BODIES)
async def test_the_same_answer(decode: Engine, chat: Any, name: str) -> None:
    async def check(options: dict[str, Any], *seams: int) -> None:
        body = BASE | BODIES[name] | options
        expected = joined(await stock(chat, body))
        found = await at_once(*(served(decode, chat, body, seam) for seam in seams))
        assert list(map(joined, found)) == [expected] * len(seams)

    await at_once(check({}, 1, 9), check(STREAMED, 4))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "does not match"),
    ({"messages": "hi"}, "messages"),
    ({"thinking_token_budget": 4}, "thinking_token_budget"),
    ({"model": "other"}, "does not exist"),
]


@pytest.mark.parametrize(("change", "fragment"), REFUSED)
async def test_what_vllm_refuses_is_refused(decode: Engine, chat: Any, change: dict[str, Any], fragment: str) -> None:
    gateway = Gateway(decode, BASE | change, 1)
    await serve(decode, chat, gateway)
    (reply,) = gateway.replies
    assert reply.status in (400, 404)
    assert fragment in json.loads(reply.data)["error"]["message"]


async def test_a_gateway_that_leaves_ends_the_request(
    decode: Engine, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway(decode, BASE, 1)
    asked = asyncio.Event()

    async def leave() -> bytes:
        if not asked.is_set():
            asked.set()
            return await gateway._inbox.get()
        raise WebSocketDisconnect(1001)

    monkeypatch.setattr(gateway, "receive_bytes", leave)
    monkeypatch.setattr(gateway, "_make", lambda _: asyncio.sleep(3600))
    async with asyncio.timeout(10):
        await serve(decode, chat, gateway)
    assert not gateway.replies
    for task in gateway._tasks.values():
        task.cancel()
