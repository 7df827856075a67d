"""The OpenAI API over HTTP."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdrelay.cluster.topology import Role
from pdrelay.errors import RequestError
from pdrelay.gateway.answer import Answer
from pdrelay.gateway.base import Generator, InstanceState, Serving
from pdrelay.gateway.choice import Choice
from pdrelay.gateway.faults import BAD_REQUEST, Fault, fault_of
from pdrelay.gateway.frames import Endpoint, Frames, Head
from pdrelay.gateway.metrics import Meter, Metrics
from pdrelay.gateway.parse import parse_chat, parse_completion
from pdrelay.gateway.prepare import Prepared, Preparer
from pdrelay.gateway.protocol import ChatRequest, CompletionRequest
from pdrelay.gateway.responses import ErrorDetail, ModelCard, ModelList
from pdrelay.gateway.served import ServedAnswer
from pdrelay.gateway.text import Text
from pdrelay.gateway.wire import CLIENT_GONE
from pdrelay.gateway.workers import Exposition

MAX_BODY_BYTES = 32 << 20
ID_PREFIX: dict[Endpoint, str] = {"chat": "chatcmpl", "completion": "cmpl"}

Parse = Callable[[bytes], ChatRequest | CompletionRequest]
Handler = Callable[[Request], Awaitable[ASGIApp]]


class FrontEnd:
    """The endpoints."""

    def __init__(
        self,
        generator: Generator,
        text: Text,
        model_name: str,
        *,
        debug: bool,
        metrics: Metrics,
        exposition: Exposition | None,
        adapters: Sequence[str],
    ) -> None:
        self._generator, self._text, self._model, self._metrics = generator, text, model_name, metrics
        self._adapters = adapters
        self._exposition = exposition or self._own_exposition
        self._preparer = Preparer(generator, text, model_name, debug=debug, adapters=adapters)
        digest = hashlib.sha256(model_name.encode()).hexdigest()[:8]
        self._fingerprint = f"pdrelay-{version('pdrelay')}-{digest}"
        self._since = int(time.time())

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._generate(request, "chat", parse_chat)

    async def completion(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        return await self._generate(request, "completion", parse_completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList(data=[self._card(name) for name in (self._model, *self._adapters)]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        name = request.path_params["model"]
        self._preparer.check_model(name)
        return _json(self._card(name))

    async def health(self, request: Request) -> Response:
        """GET /health: the instances; 503 when no request can be served."""
        states = self._generator.health()
        return _json([state._asdict() for state in states], 200 if _can_serve(states) else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(await self._exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _own_exposition(self) -> bytes:
        return self._metrics.exposition()

    async def _generate(self, request: Request, endpoint: Endpoint, parse: Parse) -> ASGIApp:
        arrival = time.monotonic()
        request_id = f"{ID_PREFIX[endpoint]}-{uuid.uuid4().hex}"
        try:
            body = await _read_body(request)
            parsed = parse(body)
            if isinstance(parsed, ChatRequest) and (serving := self._serving_for(parsed)):
                served = self._preparer.serve(parsed, body, request_id, arrival)
                return ServedAnswer(served, serving, self._generator.generate, Meter(self._metrics, endpoint, arrival))
            prepared = await self._preparer.prepare(parsed, request_id, arrival)
            choices = self._choices(prepared)
            choices[0].begin()
        except ClientDisconnect:
            self._metrics.refused(endpoint, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # the client must get an answer, whatever it was
            fault = fault_of(error)
            self._metrics.refused(endpoint, fault.status)
            return fault.response()
        meter = Meter(self._metrics, endpoint, arrival)
        meter.prompt(sum(len(choice.prompt) for choice in choices if choice.leader is None))
        frames = Frames(
            endpoint, self._head(request_id, parsed.model), choices=len(choices), usage=prepared.wanted.usage
        )
        return Answer(request_id, prepared.wanted, choices, frames, self._text, meter)

    def _serving_for(self, request: ChatRequest) -> Serving | None:
        """The serving layer, if the request needs one. Raises RequestError when it does and there is none."""
        serving = self._generator.serving()
        if serving is None and request.needs_serving:
            raise RequestError(
                "Tools and reasoning are rendered by vLLM's serving layer, and no healthy instance has one.",
                param="tools" if request.tools else "messages",
                code="unsupported_parameter",
            )
        return serving if serving and (request.needs_serving or serving.parsers.reasoning) else None

    def _choices(self, prepared: Prepared) -> list[Choice]:
        choices: list[Choice] = []
        for index, planned in enumerate(prepared.choices):
            first = index - index % prepared.wanted.n  # of those with the same prompt
            leader = choices[first] if first < index else None
            logprobs = prepared.wanted.logprobs is not None
            choices.append(
                Choice(index, planned, self._generator.generate, self._text, logprobs=logprobs, leader=leader)
            )
        return choices

    def _head(self, request_id: str, model: str | None) -> Head:
        return Head(request_id, int(time.time()), model or self._model, self._fingerprint)

    def _card(self, name: str) -> ModelCard:
        parent = self._model if name != self._model else None
        length = self._generator.max_model_len
        return ModelCard(id=name, created=self._since, root=name, parent=parent, max_model_len=length)


def build_app(
    generator: Generator,
    text: Text,
    model_name: str,
    *,
    debug: bool = False,
    metrics: Metrics | None = None,
    exposition: Exposition | None = None,
    adapters: Sequence[str] = (),
) -> ASGIApp:
    """The ASGI application of the gateway.

    `model_name` is what clients call the model. With `debug` the debug controls of requests are honoured. `metrics`
    may come with a registry that other parts of the process share; `exposition` is what /metrics shows in place of them
    alone. `adapters` are served as models of their own.
    """
    front = FrontEnd(
        generator, text, model_name, debug=debug, metrics=metrics or Metrics(), exposition=exposition, adapters=adapters
    )
    generation = {"/v1/chat/completions": front.chat, "/v1/completions": front.completion}
    rest = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generation.items()),
            Route("/v1/models", front.models),
            Route("/v1/models/{model:path}", front.model),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
        ],
        exception_handlers={HTTPException: _http_error, RequestError: _request_error},
    )
    return _quick(generation, rest)


def _quick(generation: Mapping[str, Handler], rest: ASGIApp) -> ASGIApp:
    """Calls the endpoints of `generation`, which answer their own errors, without `rest`'s layers around each send."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = generation.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await rest(scope, receive, send)
        else:
            answer = await endpoint(Request(scope, receive))
            await answer(scope, receive, send)

    return app


async def _read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError when it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"The body is larger than {MAX_BODY_BYTES >> 20} MiB, the most this server reads. Shorten the prompt.",
                status=413,
                code="request_too_large",
            )
    return bytes(body)


def _can_serve(states: list[InstanceState]) -> bool:
    """Whether some instance prefills and some decodes: a relay can without main decode, main decode without a relay."""
    served = {role for state in states if state.healthy for role in state.roles}
    return Role.PREFILL.value in served and not served.isdisjoint((Role.DECODE.value, Role.RELAY.value))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    response = Fault(error.status_code, ErrorDetail(message=message, type=BAD_REQUEST, code=code)).response()
    response.headers.update(error.headers or {})
    return response


async def _request_error(_: Request, error: Exception) -> Response:
    return fault_of(error).response()


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
