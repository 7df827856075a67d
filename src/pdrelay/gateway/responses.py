"""Responses of the OpenAI API, with vLLM's `stop_reason` and our `pdrelay`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdrelay.gateway.base import Trace


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. `cached_tokens` is 0 until prefill has reported it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompt: int, completion: int, cached: int) -> Usage:
    """Usage of `prompt` and `completion` tokens, of the former `cached` not computed."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


class TokenMark(msgspec.Struct, frozen=True):
    """Of a traced stream's chunk: who made its tokens, and the index of the first."""

    tier: str
    index: int


class Traces(msgspec.Struct, frozen=True):
    """Of an answer with several choices: the trace of each."""

    choices: list[Trace]


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could be at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A position of a chat completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a chat completion."""

    content: list[TokenLogprob]


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a completion: lists of equal length, one element for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's: a token that could be at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
ChoiceLogprobs = ChatLogprobs | TextLogprobs
Pdrelay = TokenMark | Trace | Traces | UnsetType
FinishReason = Literal["stop", "length"]


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a chat completion."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a chunk."""

    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a completion or of its chunk."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


Choice = ChatChoice | ChatChunkChoice | TextChoice


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """A response body or a chunk; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # chat's; a completion has them in its choices
    prompt_token_ids: list[int] | UnsetType = UNSET  # the same
    usage: Usage | UnsetType | None = UNSET
    pdrelay: Pdrelay = UNSET


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdrelay"
    root: str
    parent: str | None = None  # the model that it is an adapter of
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
