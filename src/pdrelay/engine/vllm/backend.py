"""EngineBackend on vLLM's asynchronous engine client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from pdrelay.depot.base import DepotControl
from pdrelay.engine.base import Chunk, Emit
from pdrelay.engine.messages import Finished, Hello, Load, Open, Prefilled, Tokens
from pdrelay.engine.vllm.admission import Admission, Budget
from pdrelay.engine.vllm.decode import Decode, Engine, request_id, require_room
from pdrelay.engine.vllm.jobs import PUBLISH
from pdrelay.engine.vllm.sampling import to_vllm
from pdrelay.engine.vllm.session import Chunk as VllmChunk
from pdrelay.engine.vllm.session import Output, Reason, next_output, parse
from pdrelay.engine.vllm.watchdog import Watchdog
from pdrelay.errors import EngineRejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest


class VllmBackend:
    """One vLLM instance. `kv_usage` tells how full its KV cache is, 0 to 1; `loras` are the adapters it serves."""

    def __init__(
        self,
        engine: EngineClient,
        depot: DepotControl,
        hello: Hello,
        budget: Budget,
        kv_usage: Callable[[], float] = lambda: 0.0,
        loras: Mapping[str, LoRARequest] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._engine, self._depot, self._hello, self._kv_usage = engine, depot, hello, kv_usage
        self._loras = loras if loras is not None else {}
        self._waiting = self._running = 0
        self._shared = Engine(engine, hello.max_model_len, Admission(budget), watchdog or Watchdog())

    @property
    def hello(self) -> Hello:
        """See EngineBackend."""
        return self._hello

    def load(self) -> Load:
        """Sessions that wait for pages or for admission count as waiting, all others as running."""
        admitting = self._shared.admission.waiting
        return Load(running=self._running - admitting, waiting=self._waiting + admitting, kv_usage=self._kv_usage())

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
                await Decode(self._shared, request, lora, emit, started).run(chunks)
        finally:
            self._running -= 1

    def _check(self, request: Open) -> None:
        if not request.prompt:
            raise EngineRejectedError("the prompt is empty")
        if request.mode == "prefill" and request.eager:
            raise EngineRejectedError("a prefill session takes no eager tokens")
        require_room(request, len(request.eager), self._hello.max_model_len)

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
        generated = self._engine.generate(prompt, params, request_id(request), lora_request=lora)
        async with aclosing(generated) as outputs:
            output = parse(await next_output(outputs), params)
            self._shared.watchdog.progressed()
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
