"""From a request's parameters to explicit Sampling: ranges as vLLM checks them, defaults, room in the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from pdrelay.engine.logprobs import CANDIDATE_BYTES
from pdrelay.engine.messages import Sampling
from pdrelay.errors import RequestError
from pdrelay.gateway.defaults import Defaults
from pdrelay.gateway.protocol import ChatRequest, CommonRequest, CompletionRequest
from pdrelay.gateway.structured import structured_output

COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default at /v1/completions
MAX_STOP_STRINGS = 4
MAX_LOGPROB_BYTES = 8 << 20  # of one prompt: engines send them in one frame


class Limits(NamedTuple):
    """What model and deployment take, in tokens."""

    max_model_len: int
    max_prompt_tokens: int
    vocab_size: int


Check = tuple[Callable[[float], bool], str]

_RANGES: dict[str, Check] = {
    "temperature": (lambda x: 0 <= x <= 2, "in [0, 2]"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "top_k": (lambda x: x >= -1, "at least 1, or 0 or -1 to switch it off"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "seed": (lambda x: -(2**63) <= x < 2**63, "a 64-bit integer"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda x: x > 0 and math.isfinite(x), "greater than 0"),
    "max_tokens": (lambda x: x >= 1, "at least 1"),
    "max_completion_tokens": (lambda x: x >= 1, "at least 1"),
    "min_tokens": (lambda x: x >= 0, "at least 0"),
    "n": (lambda x: x >= 1, "at least 1"),
    "logprobs": (lambda x: x >= 0, "at least 0"),
    "top_logprobs": (lambda x: x >= 0, "at least 0"),
    "prompt_logprobs": (lambda x: x >= 0, "at least 0"),
}


def check_parameters(request: CommonRequest, vocab_size: int) -> None:
    """Checks all that does not depend on the prompt. Raises RequestError."""
    for name, (holds, allowed) in _RANGES.items():
        value = getattr(request, name, None)
        if value is not None and not holds(value) and not (name == "max_tokens" and _only_echoes(request)):
            raise _out_of_range(name, f"must be {allowed}, got {value}.")
    _check_logprobs(request)
    structured_output(request)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or [], vocab_size)
    if request.allowed_token_ids == [] or "" in request.bad_words:
        name = "bad_words" if request.bad_words else "allowed_token_ids"
        raise _out_of_range(name, "must not be empty, nor contain what is.")
    _check_stop(stop_strings(request))
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    _logit_bias(request.logit_bias, vocab_size)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream=true.", param="stream_options")


def _only_echoes(request: CommonRequest) -> bool:
    """Whether only the prompt is wanted, with its log probabilities."""
    return isinstance(request, CompletionRequest) and request.echo and request.max_tokens == 0


def _check_logprobs(request: CommonRequest) -> None:
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise _out_of_range("top_logprobs", "needs logprobs=true.")
    if request.stream and request.prompt_logprobs:
        raise _out_of_range("prompt_logprobs", "are not available with stream=true.")


def stop_strings(request: CommonRequest) -> list[str]:
    """The request's stop strings."""
    return [request.stop] if isinstance(request.stop, str) else request.stop


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raises RequestError when one of `ids` is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise _out_of_range(name, f"has token id {bad}, ids of this model are 0 to {vocab_size - 1}.")


def sampling_for(request: CommonRequest, prompt_tokens: int, limits: Limits, defaults: Defaults) -> Sampling:
    """Explicit Sampling for a prompt of this length. Raises RequestError."""
    max_tokens = _max_tokens(request, prompt_tokens, limits, defaults)
    if request.min_tokens > max_tokens:
        raise _out_of_range("min_tokens", f"must be at most max_tokens={max_tokens}, got {request.min_tokens}.")
    stop_ids = request.stop_token_ids if request.ignore_eos else [*request.stop_token_ids, *defaults.extra_stop_ids]
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, int(_or(request.top_k, defaults.top_k))),
        min_p=_or(request.min_p, defaults.min_p),
        seed=None if request.seed == -1 else request.seed,
        presence_penalty=_or(request.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias, limits.vocab_size),
        allowed_token_ids=request.allowed_token_ids,
        bad_words=request.bad_words,
        stop_token_ids=list(dict.fromkeys(stop_ids)),
        ignore_eos=request.ignore_eos,
        logprobs=wanted_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request, prompt_tokens),
        structured=structured_output(request),
    )


def wanted_logprobs(request: CommonRequest) -> int | None:
    """Likeliest tokens to tell beside each output token; None for no log probabilities."""
    if isinstance(request, ChatRequest):
        return request.top_logprobs if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def wanted_prompt_logprobs(request: CommonRequest) -> int | None:
    """The same for the prompt. Those of an echoed prompt come with those of the output."""
    if request.prompt_logprobs is None and request.echo and not (isinstance(request, ChatRequest) and request.stream):
        return wanted_logprobs(request)
    return request.prompt_logprobs


def _prompt_logprobs(request: CommonRequest, prompt_tokens: int) -> int | None:
    wanted = wanted_prompt_logprobs(request)
    if wanted is not None and prompt_tokens * (wanted + 1) * CANDIDATE_BYTES > MAX_LOGPROB_BYTES:
        raise _out_of_range(
            "prompt_logprobs", f"of {wanted} is too much for a prompt of {prompt_tokens} tokens. Ask for fewer."
        )
    return wanted


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_prompt(prompt_tokens: int, limits: Limits) -> None:
    """Raises RequestError for a prompt that model or depots cannot take."""
    context = limits.max_model_len
    if prompt_tokens >= context:
        raise _too_long(
            f"This model's maximum context length is {context} tokens. However, your prompt contains {prompt_tokens} "
            f"input tokens, which leaves no room for output. Please reduce the length of the prompt."
        )
    if prompt_tokens > limits.max_prompt_tokens:
        raise _too_long(
            f"Your prompt contains {prompt_tokens} input tokens, but the depots of this deployment hold the KV cache "
            f"of at most {limits.max_prompt_tokens}. Please shorten the prompt, or give the depots larger arenas."
        )


def _max_tokens(request: CommonRequest, prompt_tokens: int, limits: Limits, defaults: Defaults) -> int:
    check_prompt(prompt_tokens, limits)
    context = limits.max_model_len
    room = context - prompt_tokens
    if _only_echoes(request):
        return 1  # that the prompt's log probabilities are computed
    name, asked = _asked_tokens(request)
    if asked is None:
        default = defaults.max_tokens if isinstance(request, ChatRequest) else COMPLETION_MAX_TOKENS
        return room if default is None else min(default, room)
    if asked > room:
        raise _too_long(
            f"This model's maximum context length is {context} tokens. However, you requested {asked} output tokens "
            f"and your prompt contains {prompt_tokens} input tokens, for a total of {asked + prompt_tokens} tokens. "
            f"Please reduce the length of the prompt, or {name} to at most {room}.",
            param=name,
        )
    return asked


def _asked_tokens(request: CommonRequest) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _check_stop(stop: list[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise _out_of_range("stop", f"takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    if "" in stop:
        raise _out_of_range("stop", "must not contain an empty string.")


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise _out_of_range("logit_bias", f"has the key {key[:40]!r}, keys must be token ids.")
        if not -100 <= value <= 100:
            raise _out_of_range("logit_bias", f"of token {key} must be in [-100, 100], got {value}.")
        parsed[int(key)] = value
    check_token_ids("logit_bias", list(parsed), vocab_size)
    return parsed


def _out_of_range(name: str, complaint: str) -> RequestError:
    return RequestError(f"{name} {complaint}", param=name, code="invalid_value")


def _too_long(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")
