"""The emulated engine's step loop: continuous batching in modelled time.

Every step computes one chunk of the prompts and extensions that are under way, and one token of every decoding
sequence; it takes as long as the profile says.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pdrelay.perf.equations import decode_step_seconds, extend_seconds, prefill_seconds
from pdrelay.perf.profile import Profile

OnSlice = Callable[[int, int, int], None]
Seconds = Callable[[int], float]
SLICES = 8
"""A step with a prefill in it passes in so many slices, so that layers become ready one after the other."""


class Clock(Protocol):
    """Modelled time."""

    async def sleep(self, seconds: float) -> None:
        """Lets `seconds` of modelled time pass."""
        ...


class ScaledClock:
    """A modelled second takes `scale` real ones; 0 does not wait at all."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._behind = 0.0
        self._until = 0.0  # end of the sleep before
        self._sleeper: Callable[[], asyncio.Task[Any] | None] = lambda: None  # a weak reference

    async def sleep(self, seconds: float) -> None:
        """Sleeps, and makes up for what the sleep before overslept, so that many short steps keep their rate.

        What a task does between two sleeps, such as writing pages, is work that the model's time has in it already.
        """
        wanted, task = seconds * self._scale, asyncio.current_task()
        start = self._until if task is self._sleeper() else time.perf_counter()
        worked = time.perf_counter() - start
        await asyncio.sleep(max(0.0, wanted - self._behind - worked))
        assert task is not None
        self._until, self._sleeper = time.perf_counter(), weakref.ref(task)
        self._behind = min(wanted, max(0.0, self._behind + self._until - start - wanted))


class _Job:
    """Work for the loop. It is over when `finished` is, also when whoever awaits it was cancelled."""

    def __init__(self) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call(self, callback: Callable[[], bool]) -> None:
        """Calls back and ends the job when that returns True; what it raises goes to whoever awaits the job."""
        if self.finished.done():
            return
        try:
            if callback():
                self.finished.set_result(None)
        except Exception as error:
            self.finished.set_exception(error)


class _Forward(_Job):
    """Known tokens to compute: a prompt's uncached part, or an extension. `seconds` is the time of the first n."""

    def __init__(self, tokens: int, seconds: Seconds, on_slice: OnSlice | None, fixed: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.seconds, self.on_slice = tokens, seconds, on_slice
        self.fixed = fixed  # of `seconds`, what a decode step in the same pass has as well
        self.done = 0

    def chunk_seconds(self, chunk: int, *, shared: bool) -> float:
        """Time of the next chunk, such that all chunks take as long as one forward would; `shared` with a decode
        step the weights are read once for both."""
        saved = self.fixed if shared and not self.done else 0.0
        return self.seconds(self.done + chunk) - self.seconds(self.done) - saved

    def slice_ready(self, chunk: int, first: int, last: int) -> bool:
        """Layers `first` to `last` of the chunk are computed."""
        if self.on_slice is not None:
            self.on_slice(self.done + chunk, first, last)
        return False

    def chunk_ready(self, chunk: int) -> bool:
        """The chunk is computed; True when it was the last."""
        self.done += chunk
        return self.done == self.tokens


class _Decoding(_Job):
    """A sequence that decodes. `advance` makes one token and says whether there are more to come."""

    def __init__(self, context: int, advance: Callable[[], bool]) -> None:
        super().__init__()
        self.context, self._advance = context, advance

    def step_ready(self) -> bool:
        """The step is computed; True when it was the last."""
        self.context += 1
        return not self._advance()


class StepLoop:
    """Runs steps while there is work."""

    def __init__(self, profile: Profile, clock: Clock) -> None:
        self._profile, self._clock = profile, clock
        self._forwards: list[_Forward] = []
        self._decodings: list[_Decoding] = []
        self._task: asyncio.Task[None] | None = None

    async def prefill(self, tokens: int, context: int, on_slice: OnSlice) -> None:
        """Computes `tokens` of a prompt behind `context` cached ones, chunk by chunk and layer by layer.

        `on_slice(done, first, last)`: of the chunk that ends at the prompt's `done`th uncached token, layers `first`
        to `last` (exclusive) are computed.
        """
        await self._forward(tokens, lambda n: prefill_seconds(self._profile.prefill, n, context), on_slice)

    async def extend(self, tokens: int, context: int) -> None:
        """Computes `tokens` known output tokens behind `context` computed ones."""
        fixed = min(self._profile.extend.fixed, self._profile.decode.fixed)
        await self._forward(tokens, lambda n: extend_seconds(self._profile.extend, n, context), None, fixed)

    async def decode(self, context: int, advance: Callable[[], bool]) -> None:
        """Calls `advance` at the end of every step until it returns False. All calls of a step are in one tick."""
        decoding = _Decoding(context, advance)
        self._decodings.append(decoding)
        self._start()
        await decoding.finished

    async def aclose(self) -> None:
        """Stops the loop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _forward(self, tokens: int, seconds: Seconds, on_slice: OnSlice | None, fixed: float = 0.0) -> None:
        forward = _Forward(tokens, seconds, on_slice, fixed)
        self._forwards.append(forward)
        self._start()
        await forward.finished

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="emulated steps")

    async def _run(self) -> None:
        await asyncio.sleep(0)  # all that arrives in one tick shares the first step
        while True:
            self._forwards = [job for job in self._forwards if not job.finished.done()]
            self._decodings = [job for job in self._decodings if not job.finished.done()]
            if not self._forwards and not self._decodings:
                return
            await self._step(self._next_chunks(), list(self._decodings))

    def _next_chunks(self) -> list[tuple[_Forward, int]]:
        budget = self._profile.limits.prefill_chunk
        chunks: list[tuple[_Forward, int]] = []
        for forward in self._forwards:
            chunk = min(forward.tokens - forward.done, budget)
            if chunk:
                chunks.append((forward, chunk))
                budget -= chunk
        return chunks

    async def _step(self, chunks: list[tuple[_Forward, int]], decodings: list[_Decoding]) -> None:
        context = sum(decoding.context for decoding in decodings)
        seconds = decode_step_seconds(self._profile.decode, len(decodings), context)
        seconds += sum(forward.chunk_seconds(chunk, shared=bool(decodings)) for forward, chunk in chunks)
        await self._pass_time(seconds, chunks)
        for forward, chunk in chunks:
            forward.call(partial(forward.chunk_ready, chunk))
        for decoding in decodings:
            decoding.call(decoding.step_ready)

    async def _pass_time(self, seconds: float, chunks: list[tuple[_Forward, int]]) -> None:
        layers = self._profile.kv.layers
        layered = [(forward, chunk) for forward, chunk in chunks if forward.on_slice]
        slices = min(SLICES, layers) if layered else 1
        for number in range(slices):
            await self._clock.sleep(seconds / slices)
            first, last = layers * number // slices, layers * (number + 1) // slices
            for forward, chunk in layered:
                forward.call(partial(forward.slice_ready, chunk, first, last))
