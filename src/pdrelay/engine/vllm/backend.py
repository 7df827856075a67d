"""EngineBackend on vLLM's asynchronous engine client.

A decode session is one resumable vLLM request. Each of its chunks but the last samples one token: the engine's own
prediction of what comes next. It is emitted only when the engine takes over without having been given another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING
from uuid import uuid4

from pdrelay.depot.base import DepotControl
from pdrelay.engine.base import Chunk, Emit
from pdrelay.engine.messages import Extended, Finished, Hello, Load, Open, Opened, Prefilled, Takeover, Tokens
from pdrelay.engine.vllm import session_params
from pdrelay.engine.vllm.jobs import PUBLISH
from pdrelay.engine.vllm.sampling import to_vllm
from pdrelay.engine.vllm.session import Chunk as VllmChunk
from pdrelay.engine.vllm.session import Output, Reason, Session, next_output, parse
from pdrelay.errors import EngineRejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest

_log = logging.getLogger(__name__)


class VllmBackend:
    """One vLLM instance. `kv_usage` tells how full its KV cache is, 0 to 1; `loras` are the adapters it serves."""

    def __init__(
        self,
        engine: EngineClient,
        depot: DepotControl,
        hello: Hello,
        kv_usage: Callable[[], float] = lambda: 0.0,
        loras: Mapping[str, LoRARequest] | None = None,
    ) -> None:
        self._engine, self._depot, self._hello, self._kv_usage = engine, depot, hello, kv_usage
        self._loras = loras if loras is not None else {}
        self._waiting = self._running = 0

    @property
    def hello(self) -> Hello:
        """See EngineBackend."""
        return self._hello

    def load(self) -> Load:
        """Sessions that wait for pages count as waiting, all others as running."""
        return Load(running=self._running, waiting=self._waiting, kv_usage=self._kv_usage())

    async def run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        """See EngineBackend."""
        started = time.monotonic()
        self._check(request)
        lora = self._lora(request)
        self._waiting += 1
        try:
            if request.await_names:
                await self._depot.wait(request.await_names, self._hello.instance)
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            if request.mode == "prefill":
                await self._prefill(request, lora, emit)
            else:
                await _Decode(self._engine, request, lora, self._hello.max_model_len, emit).run(chunks, started)
        finally:
            self._running -= 1

    def _check(self, request: Open) -> None:
        if not request.prompt:
            raise EngineRejectedError("the prompt is empty")
        if request.mode == "prefill" and request.eager:
            raise EngineRejectedError("a prefill session takes no eager tokens")
        _require_room(request, len(request.eager), self._hello.max_model_len)

    def _lora(self, request: Open) -> LoRARequest | None:
        if not request.lora:
            return None
        if request.lora not in self._loras:
            served = ", ".join(self._loras) or "none"
            raise EngineRejectedError(f"{self._hello.instance} has no adapter {request.lora!r}; it has {served}", 503)
        return self._loras[request.lora]

    async def _prefill(self, request: Open, lora: LoRARequest | None, emit: Emit) -> None:
        extra = {"kv_transfer_params": {PUBLISH: True}}
        params = to_vllm(request.sampling, 1, extra, prompt_logprobs=request.sampling.prompt_logprobs)
        prompt = VllmChunk(request.prompt, params, request.cache_salt).prompt
        generated = self._engine.generate(prompt, params, _request_id(request), lora_request=lora)
        async with aclosing(generated) as outputs:
            output = parse(await next_output(outputs), params)
            async for _ in outputs:
                pass
        if output.report.error:
            raise EngineRejectedError(f"prefill computed, but not published: {output.report.error}", 503)
        reason = self._prefill_reason(request, output)
        cached = output.report.cached + output.report.loaded
        prefilled = Prefilled(cached_tokens=cached, logprobs=output.prompt_logprobs)
        emit(Tokens(request.sid, 0, output.ids, reason is not None, output.logprobs, prefilled))
        emit(Finished(sid=request.sid, reason=reason, stop_reason=output.stop_reason))

    def _prefill_reason(self, request: Open, output: Output) -> Reason | None:
        """The natural end, if token 0 is one: that prefill samples one token only is not."""
        full = request.sampling.max_tokens == 1 or len(request.prompt) + 1 >= self._hello.max_model_len
        return output.finish_reason if output.finish_reason == "stop" or full else None


class _Decode:
    """One decode session."""

    def __init__(
        self, engine: EngineClient, request: Open, lora: LoRARequest | None, max_model_len: int, emit: Emit
    ) -> None:
        self._engine, self._request, self._lora = engine, request, lora
        self._max_model_len, self._emit = max_model_len, emit
        self._known = len(request.eager)  # output tokens that the engine was given

    async def run(self, chunks: AsyncIterator[Chunk], started: float) -> None:
        """From the moment the pages are complete to Finished."""
        pages_ready = time.monotonic()
        first = self._open_chunk()
        async with aclosing(Session(self._engine, _request_id(self._request), first, self._lora)) as session:
            opened = predicted = await _sample(session, first)
            self._emit(
                Opened(
                    sid=self._request.sid,
                    cached_tokens=opened.report.cached,
                    loaded_tokens=opened.report.loaded,
                    pages_ready=pages_ready - started,
                    ready=time.monotonic() - started,
                    prediction=predicted.ids[0],
                )
            )
            async for chunk in chunks:
                self._known += len(chunk.ids)
                if isinstance(chunk, Takeover):
                    await self._take_over(session, chunk.ids, predicted)
                    return
                if chunk.ids:
                    predicted = await self._extend(session, chunk.ids)
                self._emit(Extended(self._request.sid, self._known, predicted.ids[0]))

    def _open_chunk(self) -> VllmChunk:
        request = self._request
        extra: dict[str, object] = {session_params.DISCARD: True}
        if request.eager:
            extra[session_params.EAGER] = request.eager
        return VllmChunk(request.prompt, to_vllm(request.sampling, self._known + 1, extra), request.cache_salt)

    async def _extend(self, session: Session, ids: list[int]) -> Output:
        _require_room(self._request, self._known, self._max_model_len)
        params = to_vllm(self._request.sampling, self._known + 1, {session_params.DISCARD: True})
        return await _sample(session, VllmChunk(ids, params))

    async def _take_over(self, session: Session, ids: list[int], predicted: Output) -> None:
        request = self._request
        if self._full():
            self._emit(Finished(sid=request.sid, reason="length"))
            return
        if not ids:
            # Computing the last token again would cost a step, and a linear state cannot take a token twice.
            ids, index = predicted.ids, self._known
            self._known += 1
            self._emit_tokens(index, predicted._replace(finish_reason=self._reason(predicted)))
            if self._reason(predicted) is not None:
                return
        chunk = VllmChunk(ids, to_vllm(request.sampling, request.sampling.max_tokens))
        async for output in session.compute(chunk, last=True):
            self._emit_tokens(self._known, output)
            self._known += len(output.ids)

    def _emit_tokens(self, index: int, output: Output) -> None:
        ended = output.finish_reason
        if output.ids:
            self._emit(Tokens(self._request.sid, index, output.ids, ended is not None, output.logprobs))
        if ended is not None:
            self._emit(Finished(sid=self._request.sid, reason=ended, stop_reason=output.stop_reason))

    def _reason(self, predicted: Output) -> Reason | None:
        """Whether the output ends with a prediction, which always ends a chunk."""
        return "stop" if predicted.finish_reason == "stop" else "length" if self._full() else None

    def _full(self) -> bool:
        request = self._request
        return self._known >= request.sampling.max_tokens or len(request.prompt) + self._known >= self._max_model_len


async def _sample(session: Session, chunk: VllmChunk) -> Output:
    """Computes a chunk and samples the one token that is thrown away."""
    outputs = [output async for output in session.compute(chunk)]
    assert len(outputs) == 1, "INV-SESSION-5: a chunk that does not take over samples one token"
    return outputs[0]


def _require_room(request: Open, known: int, max_model_len: int) -> None:
    # vLLM checks a prompt against its context length, but not a session's chunks together.
    tokens = len(request.prompt) + known
    if tokens + 1 > max_model_len:
        raise EngineRejectedError(
            f"{len(request.prompt)} prompt tokens and {known} output tokens leave no room in the context of "
            f"{max_model_len} tokens"
        )


def _request_id(request: Open) -> str:
    return f"{request.sid}-{uuid4().hex[:8]}"
