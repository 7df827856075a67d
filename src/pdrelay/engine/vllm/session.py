"""One vLLM request, driven in lock-step: one chunk in, all its outputs out, then the next chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMClientError

from pdrelay.engine.logprobs import Logprobs, Row, pack
from pdrelay.engine.vllm.jobs import REPORT
from pdrelay.errors import EngineError, EngineRejectedError

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

Reason = Literal["stop", "length"]
_REASONS: dict[str | None, Reason | None] = {None: None, "stop": "stop", "length": "length"}


class Report(msgspec.Struct, frozen=True):
    """What the connector did for a request."""

    cached: int = 0  # tokens found in the engine's own cache
    loaded: int = 0  # tokens loaded from the depot
    error: str = ""  # why its pages are not published


class Output(NamedTuple):
    """What a chunk, or a part of it, produced."""

    ids: list[int]
    finish_reason: Reason | None  # with the chunk's last output
    stop_reason: int | None
    report: Report
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


class Chunk(NamedTuple):
    """Tokens to compute, and how to go on from there."""

    ids: list[int]
    params: SamplingParams
    cache_salt: str = ""

    @property
    def prompt(self) -> dict[str, object]:
        """In the form that vLLM's renderer makes."""
        # A copy: vLLM appends the session's later chunks to this list.
        prompt: dict[str, object] = {"type": "token", "prompt_token_ids": list(self.ids)}
        return prompt | {"cache_salt": self.cache_salt} if self.cache_salt else prompt


class Session:
    """A resumable request. `aclose` ends it at any moment: it is aborted if it still runs.

    INV-SESSION-4: at most one chunk is outstanding. vLLM 0.32 merges the outputs of neighbouring chunks otherwise.
    """

    def __init__(self, engine: EngineClient, request_id: str, first: Chunk, lora: LoRARequest | None = None) -> None:
        self._first = first
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._outputs = engine.generate(self._inputs(), first.params, request_id, lora_request=lora)
        self._finished = False

    async def compute(self, chunk: Chunk, *, last: bool = False) -> AsyncIterator[Output]:
        """Computes one chunk; iterate to the end.

        Raises EngineRejectedError for a bad chunk, EngineError when vLLM gave the request up.
        """
        self._chunks.put_nowait(chunk)
        if last:
            self._chunks.put_nowait(None)  # at once: vLLM holds the blocks of a request that may go on
        finish_reason = None
        while finish_reason is None:
            output = await next_output(self._outputs)
            self._finished = output.finished
            result = parse(output, chunk.params)
            finish_reason = result.finish_reason
            yield result

    async def aclose(self) -> None:
        """Ends the request."""
        if self._finished:
            async for _ in self._outputs:
                pass
        await self._outputs.aclose()

    async def _inputs(self) -> AsyncGenerator[StreamingInput, None]:
        while (chunk := await self._chunks.get()) is not None:
            yield StreamingInput(prompt=chunk.prompt, sampling_params=chunk.params)


async def next_output(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The next output of a vLLM request. Raises EngineRejectedError, EngineError."""
    try:
        return await anext(outputs)
    except StopAsyncIteration:
        raise EngineError("vLLM ended the request without a result") from None
    except (ValueError, VLLMClientError) as error:
        raise EngineRejectedError(str(error)) from error


def parse(output: RequestOutput, params: SamplingParams) -> Output:
    """What `output` says of a request with `params`.

    Raises EngineError for a request that vLLM aborted: in a session that looks like the end of a chunk.
    """
    completion = output.outputs[0]
    if completion.finish_reason not in _REASONS:
        raise EngineError(f"vLLM ended the request: {completion.finish_reason}")
    stop_reason = completion.stop_reason if isinstance(completion.stop_reason, int) else None
    told = (output.kv_transfer_params or {}).get(REPORT)
    report = msgspec.convert(told, Report) if told is not None else Report(cached=output.num_cached_tokens or 0)
    return Output(
        list(completion.token_ids),
        _REASONS[completion.finish_reason],
        stop_reason,
        report,
        packed(completion.logprobs, params.logprobs),
        packed(output.prompt_logprobs, params.prompt_logprobs),
    )


def packed(logprobs: FlatLogprobs | None, likeliest: int | None) -> Logprobs | None:
    """vLLM's log probabilities of `likeliest` tokens beside the one there. The first prompt token has no row."""
    if logprobs is None or likeliest is None:
        return None
    ids, values, ranks = logprobs.token_ids, logprobs.logprobs, logprobs.ranks
    ends = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return pack(
        _whole_row(Row(ids[start:end], values[start:end], ranks[start] or 0), likeliest + 1)
        for start, end in ends
        if end > start
    )


def _whole_row(row: Row, width: int) -> Row:
    """Where vLLM merges outputs, a token that is also among the likeliest ones comes only once."""
    if len(row.ids) == width:
        return row
    ids, values, place = list(row.ids), list(row.values), row.rank
    ids.insert(place, ids[0])
    values.insert(place, values[0])
    return Row(ids, values, place)
