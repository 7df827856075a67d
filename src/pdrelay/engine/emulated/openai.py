"""A plain OpenAI face of the emulated engine alone: `/v1/completions`, `/v1/models`, `/health`.

For references and load tools that want one engine without prefill, relay and main decode. It has no tokenizer: a text
prompt is taken byte by byte, and tokens are written as their ids.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.handle import SessionHandle
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import Failed, Finished, Open, Sampling, Tokens
from pdrelay.errors import EngineRejectedError, EngineUnavailableError


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a request's body; other fields change nothing in an emulated engine."""

    model: str = ""
    prompt: list[int] | str
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    return_token_ids: bool = False
    n: Literal[1] = 1

    @property
    def token_ids(self) -> list[int]:
        """The prompt in token ids."""
        return list(self.prompt.encode()) if isinstance(self.prompt, str) else self.prompt


OpenSession = Callable[[CompletionRequest], SessionHandle]


class OpenAIFace:
    """Serves one backend by itself."""

    def __init__(self, backend: EmulatedBackend) -> None:
        self._engine, self._hello = LocalEngine(backend), backend.hello

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]

    async def aclose(self) -> None:
        """Ends all requests."""
        await self._engine.aclose()

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _models(self, _: Request) -> Response:
        hello = self._hello
        model = {"id": hello.model, "object": "model", "owned_by": "pdrelay", "max_model_len": hello.max_model_len}
        return _json({"object": "list", "data": [model]})

    async def _completions(self, http: Request) -> Response:
        try:
            request = msgspec.json.decode(await http.body(), type=CompletionRequest)
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        if request.model not in ("", self._hello.model):
            return _error(404, f"the model {request.model!r} does not exist, {self._hello.model!r} does")
        answer = _Answer(request, self._hello.model, self._open)
        if request.stream:
            return StreamingResponse(answer.stream(), media_type="text/event-stream")
        return await answer.whole()

    def _open(self, request: CompletionRequest) -> SessionHandle:
        sampling = Sampling(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
        )
        session = self._engine.open(Open(sid=uuid4().hex, mode="decode", prompt=request.token_ids, sampling=sampling))
        session.takeover([])
        return session


class _Answer:
    """One request's answer."""

    def __init__(self, request: CompletionRequest, model: str, open_session: OpenSession) -> None:
        self._request, self._model, self._open = request, model, open_session
        self._id, self._created = f"cmpl-{uuid4().hex}", int(time.time())

    async def whole(self) -> Response:
        """The answer in one piece."""
        ids: list[int] = []
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        return _json(self._body(ids, event, usage=len(ids)))
                    ids += event.ids
        except EngineRejectedError as error:
            return _error(error.status, str(error))
        raise AssertionError("a session ends with Finished or Failed")

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        count = 0
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    ids, finished = ([], event) if isinstance(event, Finished) else (event.ids, None)
                    count += len(ids)
                    yield _sse(self._body(ids, finished, usage=count if finished else None))
        except EngineRejectedError as error:
            yield _sse(_error_body(error.status, str(error)))
        yield b"data: [DONE]\n\n"

    async def _events(self) -> AsyncGenerator[Tokens | Finished, None]:
        session = None
        try:
            session = self._open(self._request)
            async for event in session:
                if isinstance(event, Failed):
                    raise EngineRejectedError(event.message, event.status)
                if isinstance(event, Tokens | Finished):
                    yield event
        except EngineUnavailableError as error:
            raise EngineRejectedError(str(error), 503) from error
        finally:
            if session is not None:
                session.abort()

    def _body(self, ids: list[int], finished: Finished | None, usage: int | None) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": 0,
            "text": "".join(f" {token}" for token in ids),
            "logprobs": None,
            "finish_reason": finished and finished.reason,
            "stop_reason": finished and finished.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = ids
        body: dict[str, object] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }
        if usage is not None:
            prompt = len(self._request.token_ids)
            body["usage"] = {"prompt_tokens": prompt, "completion_tokens": usage, "total_tokens": prompt + usage}
        return body


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error_body(status: int, message: str) -> dict[str, object]:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> Response:
    return _json(_error_body(status, message), status)
