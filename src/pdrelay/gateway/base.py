"""The seam between the OpenAI front end and the request life behind it.

The front end (`gateway/app.py` and beside it) speaks HTTP, text and JSON; a `Generator` speaks token ids. The real one
is `gateway/coordinator.py`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from pdrelay.engine.logprobs import Logprobs
from pdrelay.engine.messages import Parsers, Sampling
from pdrelay.engine.serving import ServingConnection
from pdrelay.policy.base import Pipeline


class Tier(enum.Enum):
    """The kind of engine that made a token."""

    PREFILL = "prefill"
    RELAY = "relay"
    MAIN = "main"

    __hash__ = object.__hash__  # Enum's own is a Python function, and every token is counted by tier


class DebugControls(NamedTuple):
    """Force the path and the seam of one request; honoured only in debug mode."""

    pipeline: Pipeline | None = None
    handoff_mode: Literal["one_shot", "catch_up"] | None = None
    handoff_at: int | None = None  # first index that main decode emits


class GenerationRequest(NamedTuple):
    """One request, in token ids."""

    request_id: str
    arrival: float  # time.monotonic() when the first byte was read
    prompt: list[int]
    sampling: Sampling
    cache_salt: str = ""
    debug: DebugControls = DebugControls()
    max_gap: float = 0.0  # longest pause between tokens that the client accepts, seconds; 0 when it did not say
    lora: str = ""  # name of the adapter


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Output tokens in order, each index once (INV-STREAM-1)."""

    index: int  # of the first
    ids: list[int]
    tier: Tier
    logprobs: Logprobs | None = None  # a row for each of `ids`, if the request asked for them
    last: bool = False  # the output ends with it

    def split(self) -> list[TokenBatch]:
        """The same tokens, one a batch."""
        rows, end = self.logprobs, len(self.ids) - 1
        return [
            TokenBatch(self.index + at, [token], self.tier, rows and rows[at : at + 1], self.last and at == end)
            for at, token in enumerate(self.ids)
        ]


class Finish(NamedTuple):
    """How the output ended."""

    reason: Literal["stop", "length"]
    stop_reason: int | None  # the stop token, unless it was the model's EOS


class Extend(NamedTuple):
    """One round of Catch-Up, or the switch itself."""

    tokens: int  # that main decode was told
    seconds: float  # until it had computed them, line included
    left: int  # tokens that the relay made meanwhile


class Trace(msgspec.Struct, kw_only=True):
    """What happened to one request. Times are in seconds since arrival, None for what did not happen."""

    pipeline: str
    prefill_instance: str
    relay_instance: str | None
    main_instance: str
    hit_rate: float  # share of the prompt that main decode or its depot held when the request was placed
    prompt_tokens: int = 0
    prefill_hit_rate: float | None = None  # share that prefill did not compute
    wan_bytes: int = 0
    wan_bytes_saved: int = 0
    prefill_tokens: int = 0
    relay_tokens: int = 0
    main_tokens: int = 0
    handoff_index: int | None = None
    handoff_mode: str | None = None
    handoff_rounds: int = 0  # extends before the switch
    handoff_extends: list[Extend] = []
    relay_extra_tokens: int = 0  # that the relay made since main decode was ready: One-Shot would not have had them
    held_back: int = 0  # tokens that filled the pause of the switch
    token_ids: list[int] = []
    prefill_done: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    kv_ready: float | None = None
    handoff_start: float | None = None
    handoff_done: float | None = None
    finished: float | None = None


class Sink(Protocol):
    """Takes tokens that decide nothing, past the iteration.

    It is called from the event loop's own callbacks, for no token before the third.
    """

    def take(self, index: int, ids: list[int]) -> bool:
        """Tokens `index` and following. False when it does not take any now: then they come by iteration."""
        ...


class TokenStream(Protocol):
    """The running output of one request. Iterate once, then always `aclose`."""

    def divert(self, sink: Sink) -> None:
        """From now on tokens may go to `sink` while whoever iterates waits for the next batch; the last never do."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """Batches until the natural end. Raises PlacementError, EngineRejectedError, EngineUnavailableError."""
        ...

    @property
    def finish(self) -> Finish | None:
        """How it ended; None before the natural end, and when the caller stopped it."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill did not have to compute."""
        ...

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """A row for each prompt token but the first, from token 0 on, if the request asked for them."""
        ...

    async def trace(self) -> Trace:
        """What happened so far."""
        ...

    async def aclose(self, *, complete: bool = False) -> None:
        """Ends every leg and lease of the request. Idempotent; safe at any moment.

        `complete`: the caller has all it wanted, as at a stop string; pages go where the next turn needs them.
        """
        ...


class InstanceState(NamedTuple):
    """One line of `/health`."""

    instance: str
    cluster: str
    roles: list[str]
    healthy: bool
    detail: str
    alarm: str = ""  # what is suspicious about it although it is healthy


ServingConnector = Callable[[], AbstractAsyncContextManager[ServingConnection]]
"""Opens a connection to one instance's serving layer. Entering it raises EngineUnavailableError."""


class Serving(NamedTuple):
    """An instance whose serving layer (`engine/serving.py`) answers requests."""

    instance: str
    parsers: Parsers
    connect: ServingConnector


class Generator(Protocol):
    """Runs requests through prefill, relay and main decode."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus output tokens that the engines take."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt whose pages fit into every depot."""
        ...

    def serving(self) -> Serving | None:
        """A serving layer; None when no instance has one. Raises PlacementError when all that have one are down."""
        ...

    def generate(self, request: GenerationRequest) -> TokenStream:
        """Starts one request. Raises PlacementError at once when a role has no healthy instance."""
        ...

    def health(self) -> list[InstanceState]:
        """All instances."""
        ...
