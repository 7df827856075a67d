"""The emulated engine: modelled timing, real pages through the host's real depot, tokens that show every mistake."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from itertools import count
from uuid import uuid4

import msgspec

from pdrelay.depot.base import DepotControl, PageKind
from pdrelay.engine.base import Chunk, Emit
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.emulated.kv_memory import KvMemory
from pdrelay.engine.emulated.pages import write_parts
from pdrelay.engine.emulated.sequence import EngineParts, Running
from pdrelay.engine.emulated.steps import Clock, ScaledClock, StepLoop
from pdrelay.engine.emulated.tokens import Stop, prompt_rows
from pdrelay.engine.logprobs import Logprobs, pack
from pdrelay.engine.messages import Extend, Extended, Finished, Hello, Load, Open, Opened, Prefilled, Takeover, Tokens
from pdrelay.errors import ArenaFullError, DepotUnavailableError, EngineRejectedError
from pdrelay.perf.profile import Profile

_log = logging.getLogger(__name__)


class EmulatedBackend:
    """An `EngineBackend` with the timing of `profile`. With `publish_decode` it publishes the pages its output fills.

    Construct inside a running loop; `aclose` frees everything, the depot's connection included.
    """

    def __init__(
        self,
        *,
        instance: str,
        model: str,
        revision: str = "",
        max_model_len: int,
        profile: Profile,
        depot: HostDepot,
        control: DepotControl,
        publish_decode: bool = False,
        adapters: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        memory = KvMemory(profile.kv.capacity_pages, profile.limits.max_num_seqs, depot.report_held)
        steps = StepLoop(profile, clock or ScaledClock())
        self._parts = EngineParts(
            profile, profile.contract(model, revision), max_model_len, memory, steps, adapters or {}
        )
        self._depot, self._control, self._publish_decode = depot, control, publish_decode
        self._owners = count(1)
        self._publishing: set[asyncio.Task[None]] = set()
        self.hello = Hello(
            instance=instance,
            epoch=uuid4().hex,
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=profile.limits.max_num_seqs,
            contract=self._parts.contract,
        )

    def load(self) -> Load:
        """What it is doing now."""
        memory = self._parts.memory
        return Load(running=memory.running, waiting=memory.waiting, kv_usage=memory.usage)

    async def run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        """See EngineBackend."""
        depot = await self._depot.connection()
        running = Running(self._parts, depot, request, f"{request.sid}#{next(self._owners)}")
        try:
            if request.mode == "prefill":
                await self._prefill(running, request, emit)
            else:
                await self._decode(running, request, chunks, emit)
        finally:
            await running.close()

    async def aclose(self) -> None:
        """Stops all work. Sessions must have ended."""
        await self._parts.steps.aclose()
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)
        self._depot.close()

    async def _prefill(self, running: Running, request: Open, emit: Emit) -> None:
        await running.admit(output_tokens=0)
        await running.load()
        await running.reserve()
        await running.compute_prompt()
        tokens, stop = _next_token(running, request.sid)
        cached = running.cached_tokens + running.loaded_tokens
        prefilled = Prefilled(cached_tokens=cached, logprobs=self._prompt_logprobs(request))
        emit(msgspec.structs.replace(tokens, prefilled=prefilled))
        emit(_finished(request.sid, stop))

    async def _decode(self, running: Running, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        start = time.monotonic()
        if request.await_names:
            await self._control.wait(request.await_names, self.hello.instance)
        pages_ready = time.monotonic() - start
        if self._publish_decode:
            running.on_decode_page = self._start_publishing
        if request.takes_over:
            first = await anext(chunks)
            if not isinstance(first, Takeover):
                raise EngineRejectedError("a session with takes_over must begin with Takeover")
            running.take(first.ids)
        await running.admit(request.sampling.max_tokens)
        await running.load()
        if running.output.exhausted() is None:
            await running.compute_known()
        emit(
            Opened(
                sid=request.sid,
                cached_tokens=running.cached_tokens,
                loaded_tokens=running.loaded_tokens,
                pages_ready=pages_ready,
                ready=time.monotonic() - start,
                prediction=None if request.takes_over else running.output.predict(running.drift),
            )
        )
        async for chunk in chunks:
            await running.extend(chunk.ids)
            if isinstance(chunk, Extend):
                prediction = running.output.predict(running.drift)
                emit(Extended(request.sid, running.output.count, prediction))
        await self._generate(running, request.sid, emit)

    async def _generate(self, running: Running, sid: str, emit: Emit) -> None:
        stop = running.output.exhausted()
        if stop is not None:
            emit(_finished(sid, stop))
            return

        def next_token() -> bool:
            tokens, stop = _next_token(running, sid)
            emit(tokens)
            if stop is not None:
                emit(_finished(sid, stop))
            return stop is None

        def advance() -> bool:
            running.step()
            return next_token()

        # The forward over the known tokens gave the logits of the first one.
        if next_token():
            await self._parts.steps.decode(running.computed, advance)

    def _prompt_logprobs(self, request: Open) -> Logprobs | None:
        wanted = request.sampling.prompt_logprobs
        return None if wanted is None else pack(prompt_rows(request.prompt, self._parts.profile.vocabulary, wanted))

    def _start_publishing(self, name: bytes, drift: bytes) -> None:
        task = asyncio.create_task(self._publish(name, drift))
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _publish(self, name: bytes, drift: bytes) -> None:
        """Publishes a whole page of the output, if there is room: the next turn of a conversation starts from it."""
        contract, owner = self._parts.contract, f"decoded#{next(self._owners)}"
        try:
            depot = await self._depot.connection()
            try:
                (offset,) = await depot.reserve(owner, [name], [PageKind.PREFIX])
                if offset is not None:
                    parts = range(contract.layout_of(name).parts)
                    depot.publish(owner, write_parts(depot.arena, offset, contract, name, parts, drift))
            finally:
                await depot.release(owner)
        except (ArenaFullError, DepotUnavailableError) as error:
            _log.debug("a page of the output was not published: %s", error)


def _next_token(running: Running, sid: str) -> tuple[Tokens, Stop | None]:
    output, drift = running.output, running.drift
    index, row = output.count, output.row(drift)
    token, stop = output.generate(drift)
    return Tokens(sid, index, [token], stop is not None, pack([row]) if row else None), stop


def _finished(sid: str, stop: Stop | None) -> Finished:
    reason, stop_reason = stop or (None, None)
    return Finished(sid=sid, reason=reason, stop_reason=stop_reason)
