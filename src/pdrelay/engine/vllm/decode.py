"""A decode session on vLLM: one resumable request.

Each of its chunks but the last samples one token: the engine's own prediction of what comes next. It is emitted only
when the engine takes over without having been given another.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from pdrelay.engine.base import Chunk, Emit
from pdrelay.engine.messages import Extended, Finished, Open, Opened, Takeover, Tokens
from pdrelay.engine.vllm import session_params
from pdrelay.engine.vllm.admission import Admission, Hold
from pdrelay.engine.vllm.sampling import to_vllm
from pdrelay.engine.vllm.session import Chunk as VllmChunk
from pdrelay.engine.vllm.session import Output, Reason, Session
from pdrelay.engine.vllm.watchdog import Watchdog
from pdrelay.errors import EngineRejectedError

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest


class Engine(NamedTuple):
    """What the sessions of an instance share."""

    client: EngineClient
    max_model_len: int
    admission: Admission
    watchdog: Watchdog


class Decode:
    """One session, from the moment its pages are complete."""

    def __init__(self, engine: Engine, request: Open, lora: LoRARequest | None, emit: Emit, started: float) -> None:
        """`started` is time.monotonic() when the request was read."""
        self._engine, self._request, self._lora = engine, request, lora
        self._emit, self._started = emit, started
        self._known = list(request.eager)  # output tokens that the engine was given
        self._pages_ready = time.monotonic()

    async def run(self, chunks: AsyncIterator[Chunk]) -> None:
        """Runs it to Finished. Raises EngineRejectedError, EngineError."""
        if self._request.takes_over:
            await self._at_once(await anext(chunks))
            return
        hold = await self._engine.admission.admit(self._tokens)
        try:
            await self._in_chunks(chunks, hold)
        finally:
            hold.release()

    @property
    def _tokens(self) -> int:
        return len(self._request.prompt) + len(self._known)

    # ---- all at once: prompt and takeover in one pass ----

    async def _at_once(self, takeover: Chunk) -> None:
        if not isinstance(takeover, Takeover):
            raise EngineRejectedError("a session with takes_over must begin with Takeover")
        self._known += takeover.ids
        if self._is_full():
            self._emit(Finished(sid=self._request.sid, reason="length"))
            return
        request = self._request
        extra = {session_params.EAGER: self._known} if self._known else None
        params = to_vllm(request.sampling, request.sampling.max_tokens, extra)
        chunk = VllmChunk(request.prompt, params, request.cache_salt)
        async with aclosing(self._session(chunk)) as session:
            await self._decode(session, chunk, opens=True)

    # ---- step by step ----

    async def _in_chunks(self, chunks: AsyncIterator[Chunk], hold: Hold) -> None:
        first = self._open_chunk()
        async with aclosing(self._session(first)) as session:
            predicted = await self._sample(session, first)
            self._emit(self._opened(predicted, predicted.ids[0]))
            while not isinstance(chunk := await anext(chunks), Takeover):
                self._known += chunk.ids
                if chunk.ids:
                    hold.grow(self._tokens)
                    predicted = await self._extend(session, chunk.ids)
                self._emit(Extended(self._request.sid, len(self._known), predicted.ids[0]))
            hold.release()
            await self._take_over(session, chunk.ids, predicted)

    def _open_chunk(self) -> VllmChunk:
        request = self._request
        extra: dict[str, object] = {session_params.DISCARD: True}
        if request.eager:
            extra[session_params.EAGER] = request.eager
        return VllmChunk(request.prompt, to_vllm(request.sampling, len(self._known) + 1, extra), request.cache_salt)

    async def _extend(self, session: Session, ids: list[int]) -> Output:
        require_room(self._request, len(self._known), self._engine.max_model_len)
        params = to_vllm(self._request.sampling, len(self._known) + 1, {session_params.DISCARD: True})
        return await self._sample(session, VllmChunk(ids, params))

    async def _take_over(self, session: Session, ids: list[int], predicted: Output) -> None:
        self._known += ids
        if self._is_full():
            self._emit(Finished(sid=self._request.sid, reason="length"))
            return
        if not ids:
            # Computing the last token again would cost a step, and a linear state cannot take a token twice.
            ids, index = predicted.ids, len(self._known)
            self._known += ids
            reason = self._reason(predicted)
            self._emit_tokens(index, predicted._replace(finish_reason=reason))
            if reason is not None:
                return
        sampling = self._request.sampling
        await self._decode(session, VllmChunk(ids, to_vllm(sampling, sampling.max_tokens)))

    def _reason(self, predicted: Output) -> Reason | None:
        """Whether the output ends with a prediction, which always ends a chunk."""
        return "stop" if predicted.finish_reason == "stop" else "length" if self._is_full() else None

    # ---- what both share ----

    def _session(self, first: VllmChunk) -> Session:
        return Session(self._engine.client, request_id(self._request), first, self._lora)

    async def _decode(self, session: Session, chunk: VllmChunk, *, opens: bool = False) -> None:
        """Computes the last chunk and emits what follows it, Opened before all if that chunk `opens` the session."""
        index = len(self._known)
        async for output in self._compute(session, chunk, last=True):
            if opens:
                self._emit(self._opened(output, None))
                opens = False
            self._emit_tokens(index, output)
            index += len(output.ids)

    def _emit_tokens(self, index: int, output: Output) -> None:
        sid, reason = self._request.sid, output.finish_reason
        if output.ids:
            self._emit(Tokens(sid, index, output.ids, reason is not None, output.logprobs))
        if reason is not None:
            self._emit(Finished(sid=sid, reason=reason, stop_reason=output.stop_reason))

    async def _sample(self, session: Session, chunk: VllmChunk) -> Output:
        """Computes a chunk and samples the one token that is thrown away."""
        outputs = [output async for output in self._compute(session, chunk)]
        assert len(outputs) == 1, "INV-SESSION-5: a chunk that does not take over samples one token"
        return outputs[0]

    async def _compute(self, session: Session, chunk: VllmChunk, *, last: bool = False) -> AsyncIterator[Output]:
        with self._engine.watchdog.waiting():
            async for output in session.compute(chunk, last=last):
                self._engine.watchdog.progressed()
                yield output

    def _opened(self, output: Output, prediction: int | None) -> Opened:
        return Opened(
            sid=self._request.sid,
            cached_tokens=output.report.cached,
            loaded_tokens=output.report.loaded,
            pages_ready=self._pages_ready - self._started,
            ready=time.monotonic() - self._started,
            prediction=prediction,
        )

    def _is_full(self) -> bool:
        """Whether no further token may come."""
        return len(self._known) >= self._request.sampling.max_tokens or self._tokens >= self._engine.max_model_len


def require_room(request: Open, known: int, max_model_len: int) -> None:
    """Raises EngineRejectedError when prompt and `known` output tokens leave no room for another.

    vLLM checks a prompt against its context length, but not a session's chunks together.
    """
    tokens = len(request.prompt) + known
    if tokens + 1 > max_model_len:
        raise EngineRejectedError(
            f"{len(request.prompt)} prompt tokens and {known} output tokens leave no room in the context of "
            f"{max_model_len} tokens"
        )


def request_id(request: Open) -> str:
    """An id for vLLM; one session may be tried again under the same sid on another connection."""
    return f"{request.sid}-{uuid4().hex[:8]}"
