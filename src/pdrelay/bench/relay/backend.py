"""The source as an engine behind the session protocol: no KV, no timing of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from uuid import uuid4

from pdrelay.bench.relay.source import Running, Source
from pdrelay.engine.base import Chunk, Emit
from pdrelay.engine.messages import (
    Extend,
    Extended,
    Finished,
    Hello,
    Load,
    Open,
    Opened,
    Prefilled,
    Takeover,
    Tokens,
)
from pdrelay.perf.profile import Profile


class SourceBackend:
    """An `EngineBackend`. Requests are told apart by their seed, which is the number of the client's stream."""

    def __init__(self, instance: str, model: str, max_model_len: int, profile: Profile, source: Source) -> None:
        self._source, self._words = source, profile.vocabulary
        self._running = count()
        self.hello = Hello(
            instance=instance,
            epoch=uuid4().hex,
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=profile.limits.max_num_seqs,
            contract=profile.contract(model),
        )

    def load(self) -> Load:
        """Nothing that a policy would avoid."""
        return Load(running=0, waiting=0, kv_usage=0.0)

    async def run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        """See EngineBackend."""
        sid, key = request.sid, request.sampling.seed or 0
        if request.mode == "prefill":
            emit(Tokens(sid, 0, [self._word(0)], prefilled=Prefilled()))
            emit(Finished(sid=sid, reason=None))
            return
        emit(Opened(sid=sid, cached_tokens=0, loaded_tokens=0, pages_ready=0.0, ready=0.0, prediction=self._word(0)))
        known = len(request.eager)
        async for chunk in chunks:
            known += len(chunk.ids)
            if isinstance(chunk, Extend):
                emit(Extended(sid, known, self._word(known)))
            if isinstance(chunk, Takeover):
                break
        await self._decode(sid, key, known, request.sampling.max_tokens, emit)

    async def _decode(self, sid: str, key: int, known: int, limit: int, emit: Emit) -> None:
        ended = asyncio.Event()

        def make(index: int) -> None:
            last = index + 1 == limit
            emit(Tokens(sid, index, [self._word(index)], last))
            if last:
                emit(Finished(sid=sid, reason="length"))
                ended.set()

        running = Running(key, known, limit, make)
        self._source.start(running)
        try:
            await ended.wait()
        finally:
            self._source.stop(key, running)

    def _word(self, index: int) -> int:
        words = self._words
        return words.first + index % (words.last - words.first + 1)
