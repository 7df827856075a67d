"""The session protocol between gateway and engine: msgpack over one WebSocket at `/inference/pdrelay/sessions`.

One connection carries all sessions of a gateway process with an engine. Every frame is a msgpack array of messages;
an engine sends what one of its steps produced for all sessions in one frame. A session is one live request:

    Open -> Opened -> (Extend -> Extended)* -> Takeover -> Tokens* -> Finished
    Open(takes_over) -> Takeover -> Opened -> Tokens* -> Finished
    Open(mode=prefill) -> Tokens(index 0) -> Finished

The gateway may send Takeover before Opened came; the engine keeps at most one chunk outstanding. `Abort`, or the end
of the connection, ends a session at any time and frees all it holds. `Failed` ends it from the engine's side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pdrelay.engine.logprobs import Logprobs
from pdrelay.errors import ProtocolError
from pdrelay.kv.contract import KVContract
from pdrelay.versions import Versions, agree

PATH = "/inference/pdrelay/sessions"
VERSIONS = Versions(2, 2)
"""Of the session protocol. A WebSocket subprotocol stands for each: the client offers all it speaks."""

_SUBPROTOCOL = re.compile(r"pdrelay\.v(\d{1,6})")
SUBPROTOCOLS = tuple(f"pdrelay.v{number}" for number in range(VERSIONS.high, VERSIONS.low - 1, -1))


def choose_subprotocol(offered: Sequence[str]) -> str:
    """The subprotocol of the highest version that we and a client with these subprotocols speak.

    Raises ProtocolError with both ranges.
    """
    matches = [match for match in map(_SUBPROTOCOL.fullmatch, offered) if match]
    numbers = [int(match[1]) for match in matches]
    if not numbers:
        raise ProtocolError(f"session protocol: we speak {VERSIONS}, the client offers no version at all")
    return f"pdrelay.v{agree('session protocol', VERSIONS, Versions(min(numbers), max(numbers)), 'the client')}"


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must look like, with vLLM's names (`StructuredOutputsParams`). Exactly one constraint is set.

    The last two are for models that think first, as vLLM's own front end passes them to its engine: whether the
    constraint holds from the first token on (None: the engine looks at the prompt), and arguments of its parser.
    """

    json: str | None = None  # a JSON schema as text
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters with vLLM's names and meaning. Token counts are over the whole output, relay's part included.

    Stop *strings* are the gateway's matter: it owns the detokenised stream.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # likeliest tokens to tell beside each output token; None tells nothing
    prompt_logprobs: int | None = None  # the same for the prompt; prefill's matter alone
    structured: StructuredOutput | None = None

    @property
    def repeatable(self) -> bool:
        """Whether two engines with the same logits choose the same token."""
        return self.temperature == 0 or self.seed is not None


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open", omit_defaults=True):
    """Starts a session.

    `prefill` computes the prompt, publishes its pages (tail included) to the host's depot and samples token 0.
    `decode` waits until `await_names` are complete at the host's depot, loads what the engine's own cache lacks, and
    is then `Opened`: prompt and `eager` computed, nothing emitted yet. With `takes_over` the first chunk is Takeover:
    the engine waits for it, too, and computes the prompt and its tokens in one pass, with no prediction in between.
    """

    sid: str
    mode: Literal["prefill", "decode"]
    prompt: list[int]
    sampling: Sampling
    await_names: list[bytes] = []
    eager: list[int] = []  # output tokens known at open
    cache_salt: str = ""
    lora: str = ""  # name of the adapter
    takes_over: bool = False


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Computes the KV of `ids`, output tokens that another engine made and that follow the known ones."""

    sid: str
    ids: list[int]


class Takeover(msgspec.Struct, frozen=True, tag="takeover"):
    """As Extend, and goes on decoding from there until a stop condition. The session's last chunk."""

    sid: str
    ids: list[int]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends the session; nothing more comes for it."""

    sid: str


ToEngine = Open | Extend | Takeover | Abort


class Parsers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance's serving layer (`engine/serving.py`) takes apart, by vLLM's names; empty for nothing."""

    tools: str = ""
    reasoning: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The engine's first message on a connection."""

    versions: Versions = VERSIONS
    instance: str
    epoch: str  # new at every start of the engine
    model: str
    max_model_len: int
    max_num_seqs: int
    contract: KVContract  # with model and revision as they enter page names
    parsers: Parsers | None = None  # of its serving layer; None when it has none


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Sent about once a second: what the engine is doing."""

    running: int
    waiting: int
    kv_usage: float  # 0 to 1


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Prompt and eager tokens are computed. Durations are in seconds since the engine read `Open`.

    `prediction` is None for sessions that take over at once.
    """

    sid: str
    cached_tokens: int  # found in the engine's own cache
    loaded_tokens: int  # loaded from the depot
    pages_ready: float  # when `await_names` were complete
    ready: float
    prediction: int | None = None  # the engine's own next token, never emitted


class Extended(msgspec.Struct, frozen=True, tag="extended"):
    """The chunk is computed."""

    sid: str
    computed: int  # output tokens whose KV is computed
    prediction: int  # the engine's own next token, never emitted


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What prefill tells of the prompt."""

    cached_tokens: int = 0  # found in the engine's cache or loaded from the depot
    logprobs: Logprobs | None = None  # a row for each prompt token but the first, if asked for


class Tokens(msgspec.Struct, frozen=True, tag="tokens", omit_defaults=True):
    """Output tokens `index`, `index + 1`, ... With `last`, Finished with a reason follows in the same frame.

    `logprobs` has a row for each of `ids` if the request asked for them. `prefilled` comes with token 0 of a prefill
    session.
    """

    sid: str
    index: int
    ids: list[int]
    last: bool = False
    logprobs: Logprobs | None = None
    prefilled: Prefilled | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """The natural end. After prefill `reason` is None unless token 0 already ended the request."""

    sid: str
    reason: Literal["stop", "length"] | None
    stop_reason: int | None = None  # the stop token, unless it was the model's EOS


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The session ended because of an error. `status` is HTTP's, 400 for a bad request and 5xx for the engine's own."""

    sid: str
    status: int
    message: str


FromEngine = Hello | Load | Opened | Extended | Tokens | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: list[ToEngine] | list[FromEngine]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    """Messages of a gateway's frame. Raises msgspec.ValidationError."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """Messages of an engine's frame. Raises msgspec.ValidationError."""
    return _from_engine.decode(frame)
