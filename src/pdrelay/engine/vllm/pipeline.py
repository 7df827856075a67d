"""Our pipeline in the place of vLLM's engine, as vLLM's serving layer sees it.

vLLM's `AsyncLLM` turns a request into one EngineCoreRequest for each choice, hands those to its engine core's client,
and turns what that gives back into text, log probabilities and usage. Here the client is the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from pdrelay.engine.logprobs import Logprobs
from pdrelay.engine.serving import Enough, Feed, FromServing, Generate
from pdrelay.engine.vllm.sampling import from_vllm

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_REASONS = {None: None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Pipeline:
    """An EngineCoreClient as far as `AsyncLLM.generate` uses one. `send` takes messages for the gateway."""

    def __init__(self, send: Callable[[FromServing], None]) -> None:
        self._send = send
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Asks for a choice. Raises VLLMValidationError for parameters that cannot cross a handoff."""
        self._send(Generate(request.request_id, request.prompt_token_ids, from_vllm(request)))

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Choices that ended by themselves, or were given up."""
        for request_id in request_ids:
            self._send(Enough(request_id))

    async def get_output_async(self) -> EngineCoreOutputs:
        """What came next."""
        return await self._outputs.get()

    def feed(self, feed: Feed) -> None:
        """Tokens came from the gateway."""
        prefilled = feed.prefilled
        output = EngineCoreOutput(
            request_id=feed.choice,
            new_token_ids=list(feed.ids),
            new_logprobs=feed.logprobs and LogprobsLists(*_arrays(feed.logprobs)),
            new_prompt_logprobs_tensors=_tensors(prefilled.logprobs if prefilled else None),
            finish_reason=_REASONS[feed.reason],
            stop_reason=feed.stop_reason,
            prefill_stats=prefilled and PrefillStats(num_cached_tokens=prefilled.cached_tokens),
        )
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))


class PipelineClient(AsyncLLM):  # type: ignore[misc]  # vLLM's classes are untyped here
    """A running engine's client with `pipeline` in place of the engine. Keeps no statistics; `aclose` it."""

    def __init__(self, engine: AsyncLLM, pipeline: Pipeline) -> None:
        self.__dict__ |= engine.__dict__
        self.engine_core = pipeline
        self.output_processor = OutputProcessor(engine.renderer.tokenizer, log_stats=False)
        self.output_handler = None
        self.log_stats = self.log_requests = False
        self.logger_manager = self.admission_stats = None

    @property
    def errored(self) -> bool:
        """Whatever the engine beside us does: it is not asked."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing here is ours to shut down."""

    async def aclose(self) -> None:
        """Ends the task that hands out the pipeline's outputs."""
        handler: asyncio.Task[None] | None = self.output_handler
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)


def _arrays(logprobs: Logprobs) -> tuple[Any, Any, Any]:
    """Token ids, log probabilities and ranks; the first two have shape [tokens, width]."""
    shape = (len(logprobs), logprobs.width)
    ids = np.frombuffer(logprobs.ids, "<u4").reshape(shape).astype(np.int64)
    values = np.frombuffer(logprobs.values, "<f4").reshape(shape).astype(np.float32)
    return ids, values, np.frombuffer(logprobs.ranks, "<u4").astype(np.int64)


def _tensors(logprobs: Logprobs | None) -> LogprobsTensors | None:
    return None if logprobs is None else LogprobsTensors(*map(torch.from_numpy, _arrays(logprobs)))
