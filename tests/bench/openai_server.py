"""An OpenAI endpoint whose answers a test scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Step = str | float
"""What a scripted answer does next: write a line of its stream, or wait so many seconds."""


def chunk(text: str, usage: int | None = None, **extra: Any) -> str:
    """A chunk of a completion; `usage`: tokens so far."""
    body: dict[str, Any] = {"choices": [{"index": 0, "text": text, **extra}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return f"data: {json.dumps(body)}"


def final(prompt: int, completion: int) -> str:
    """The chunk with the usage of the whole answer."""
    details = {"cached_tokens": 2}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}"


DONE = "data: [DONE]"


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Serves `handler` at the completion endpoints; yields the URL."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "scripted", "max_model_len": 512}]})


async def stream(request: web.Request, *steps: Step) -> web.StreamResponse:
    """Answers with the steps."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for step in steps:
        if isinstance(step, str):
            await response.write(f"{step}\n\n".encode())
        else:
            await asyncio.sleep(step)
    return response


async def whole(request: web.Request, pause: float = 0.0) -> web.StreamResponse:
    """Answers as vLLM does: the tokens that were asked for, counted on every chunk, `pause` before each."""
    body = await request.json()
    asked = body.get("prompt") or body["messages"][0]["content"]
    prompt = len(asked.split()) if isinstance(asked, str) else len(asked)
    steps: list[Step] = []
    for made in range(1, body["max_tokens"] + 1):
        steps += [pause, chunk("a", made) if "prompt" in body else _chat_chunk(made)]
    return await stream(request, *steps, final(prompt + 7 * ("messages" in body), body["max_tokens"]), DONE)


def _chat_chunk(made: int) -> str:
    usage = {"prompt_tokens": 3, "completion_tokens": made}
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'a'}}], 'usage': usage})}"
