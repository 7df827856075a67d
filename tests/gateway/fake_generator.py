"""A Generator that plays scripts: batches of tokens, pauses, errors."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from pdrelay.engine.logprobs import Logprobs, Row, pack
from pdrelay.gateway.base import Finish, GenerationRequest, InstanceState, Serving, Sink, Tier, TokenBatch, Trace


@dataclass
class Diverted:
    """Tokens that take the short way."""

    index: int
    ids: list[int]


EOS_CAME = Finish("stop", None)
Step = TokenBatch | Diverted | asyncio.Event | Exception


@dataclass
class Script:
    """What one request does: waits at an Event, raises an Exception, yields a TokenBatch."""

    steps: list[Step] = field(default_factory=list)
    finish: Finish = EOS_CAME


def batches(*groups: list[int], tiers: tuple[Tier, ...] = (Tier.PREFILL, Tier.RELAY, Tier.MAIN)) -> list[Step]:
    """One batch a group, the first from prefill, the second from the relay, the rest from main decode."""
    steps: list[Step] = []
    index = 0
    for number, ids in enumerate(groups):
        steps.append(TokenBatch(index, ids, tiers[min(number, len(tiers) - 1)]))
        index += len(ids)
    return steps


def rows(ids: list[int], likeliest: int) -> Logprobs:
    """Log probabilities that say which token they are of: the token is the likeliest, the next ids follow it."""
    return pack(
        Row([token, *range(token, token + likeliest)], [-token / 64, *(-token / 64 - i for i in range(likeliest))], 1)
        for token in ids
    )


class FakeStream:
    def __init__(self, script: Script, request: GenerationRequest) -> None:
        self._script, self._request = script, request
        self.finish: Finish | None = None
        self.cached_tokens = 3
        self.sent: list[int] = []
        self.closed = asyncio.Event()
        self.sink: Sink | None = None
        self.diverted = 0

    def divert(self, sink: Sink) -> None:
        self.sink = sink

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        end = len(self._script.steps) - 1
        for place, step in enumerate(self._script.steps):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            self.sent += step.ids
            if isinstance(step, Diverted):
                assert self.sink is not None
                assert self.sink.take(step.index, step.ids)
                self.diverted += 1
                continue
            wanted = self._request.sampling.logprobs
            yield replace(step, logprobs=None if wanted is None else rows(step.ids, wanted), last=place == end)
        self.finish = self._script.finish

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        wanted = self._request.sampling.prompt_logprobs
        return None if wanted is None else rows(self._request.prompt[1:], wanted)

    async def trace(self) -> Trace:
        return Trace(
            pipeline="p_rld_md",
            prefill_instance="p0",
            relay_instance="r0",
            main_instance="m0",
            hit_rate=0.25,
            prompt_tokens=len(self._request.prompt),
            prefill_hit_rate=0.75,
            wan_bytes=1000,
            wan_bytes_saved=200,
            handoff_mode="one_shot",
            token_ids=self.sent,
        )

    async def aclose(self, *, complete: bool = False) -> None:
        self.closed.set()


class FakeGenerator:
    def __init__(self) -> None:
        self.max_model_len, self.max_prompt_tokens = 256, 200
        self.script = Script()
        self.refusal: Exception | None = None
        self.requests: list[GenerationRequest] = []
        self.streams: list[FakeStream] = []
        self.started = asyncio.Event()
        self.layer: Serving | None = None
        self.cached_tokens: list[int] = []  # of the next requests
        self.states = [InstanceState(name, "a", [role], True, "") for name, role in
                       (("p0", "prefill"), ("r0", "relay"), ("m0", "decode"))]  # fmt: skip

    def play(self, *groups: list[int], finish: Finish = EOS_CAME) -> None:
        """The next requests give these groups of tokens."""
        self.script = Script(batches(*groups), finish)

    def serving(self) -> Serving | None:
        return self.layer

    def generate(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.streams.append(FakeStream(self.script, request))
        if self.cached_tokens:
            self.streams[-1].cached_tokens = self.cached_tokens.pop(0)
        self.started.set()
        return self.streams[-1]

    def health(self) -> list[InstanceState]:
        return self.states
