"""From a parsed request to a GenerationRequest: the last checks before any engine works."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pdrelay.errors import RequestError
from pdrelay.gateway.base import DebugControls, GenerationRequest, Generator
from pdrelay.gateway.detokenise import Detokeniser
from pdrelay.gateway.output import Output
from pdrelay.gateway.protocol import ChatRequest, CommonRequest, CompletionRequest, Extension
from pdrelay.gateway.sampling import Limits, check_parameters, check_token_ids, sampling_for, stop_strings
from pdrelay.gateway.text import Text
from pdrelay.policy.base import Pipeline

INLINE_CHARS = 8192  # longer texts are tokenised in a thread, so that other streams go on
MAX_CACHE_SALT = 1024


class Wanted(NamedTuple):
    """How the client wants its answer."""

    stream: bool
    usage: bool
    continuous_usage: bool
    trace: bool


class Prepared(NamedTuple):
    """A request that passed every check."""

    generation: GenerationRequest
    wanted: Wanted
    output: Output


class Preparer:
    """Checks requests against the model and what the deployment holds."""

    def __init__(self, generator: Generator, text: Text, model_name: str, *, debug: bool) -> None:
        self._generator, self._text, self._model, self._debug = generator, text, model_name, debug

    @property
    def limits(self) -> Limits:
        """As they are now: engines that come up may change them."""
        generator = self._generator
        return Limits(generator.max_model_len, generator.max_prompt_tokens, self._text.vocab_size)

    async def prepare(self, request: ChatRequest | CompletionRequest, request_id: str, arrival: float) -> Prepared:
        """Checks and tokenises. Raises RequestError."""
        self.check_model(request.model)
        limits = self.limits
        check_parameters(request, limits.vocab_size)
        if len(request.cache_salt) > MAX_CACHE_SALT:
            raise RequestError(f"cache_salt must have at most {MAX_CACHE_SALT} characters.", param="cache_salt")
        debug = self._debug_controls(request.pdrelay)
        max_gap = request.pdrelay.max_gap_ms / 1000
        if max_gap < 0:
            raise RequestError("pdrelay.max_gap_ms must not be negative.", param="pdrelay.max_gap_ms")
        if isinstance(request, ChatRequest):
            prompt = await self._chat_prompt(request, limits)
        else:
            prompt = await self._completion_prompt(request, limits)
        if not prompt:
            field = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise RequestError("The prompt is empty: send at least one token.", param=field)
        sampling = sampling_for(request, len(prompt), limits, self._text.defaults)
        generation = GenerationRequest(request_id, arrival, prompt, sampling, request.cache_salt, debug, max_gap)
        return Prepared(generation, _wanted(request), self._output(request, generation))

    def check_model(self, model: str | None) -> None:
        """Raises RequestError unless `model` is the one that is served."""
        if model not in (None, self._model):
            raise RequestError(
                f"The model {model!r} does not exist. This server serves {self._model!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _chat_prompt(self, request: ChatRequest, limits: Limits) -> list[int]:
        if request.add_generation_prompt and request.continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false: the last message is left open.",
                param="continue_final_message",
            )
        return await self._encode(self._text.render(request), request, limits)

    async def _completion_prompt(self, request: CompletionRequest, limits: Limits) -> list[int]:
        prompt = _single(request.prompt)
        if isinstance(prompt, str):
            prompt = await self._encode(prompt, request, limits)
        else:
            check_token_ids("prompt", prompt, limits.vocab_size)
        return prompt

    async def _encode(self, text: str, request: ChatRequest | CompletionRequest, limits: Limits) -> list[int]:
        special = request.add_special_tokens
        if len(text) <= INLINE_CHARS:
            return self._text.encode(text, add_special_tokens=special)
        if len(text) > limits.max_model_len * self._text.max_token_chars:
            raise RequestError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
                f"{len(text)} characters, more than so many tokens can hold. Please reduce the length of the prompt.",
                code="context_length_exceeded",
            )
        return await asyncio.to_thread(self._text.encode, text, add_special_tokens=special)

    def _debug_controls(self, extension: Extension) -> DebugControls:
        controls = DebugControls(extension.pipeline, extension.handoff_mode, extension.handoff_at)
        for name, value in controls._asdict().items():
            if value is not None and not self._debug:
                raise _control_error(name, "is a debug control; start the gateway with debug = true to use it.")
        if controls.handoff_at is not None and controls.handoff_at < 1:
            raise _control_error(
                "handoff_at", f"must be at least 1 (prefill makes token 0), got {controls.handoff_at}."
            )
        for name in ("handoff_mode", "handoff_at"):
            if getattr(controls, name) is not None and controls.pipeline in (Pipeline.P_MD, Pipeline.P_D):
                raise _control_error(name, f"needs a relay, which pipeline {controls.pipeline.value!r} does not have.")
        return controls

    def _output(self, request: CommonRequest, generation: GenerationRequest) -> Output:
        sampling, eos = generation.sampling, self._text.defaults.eos
        stop_ids = set(sampling.stop_token_ids)
        if eos is not None and not sampling.ignore_eos:
            stop_ids.add(eos)
        return Output(
            Detokeniser(self._text.backend, generation.prompt, skip_special_tokens=request.skip_special_tokens),
            stop=stop_strings(request),
            stop_ids=frozenset(stop_ids),
            min_tokens=sampling.min_tokens,
            include_stop=request.include_stop_str_in_output,
        )


def _wanted(request: CommonRequest) -> Wanted:
    options = request.stream_options
    usage = options is not None and options.include_usage
    continuous = options is not None and options.include_usage and options.continuous_usage_stats
    return Wanted(request.stream, usage, continuous, request.pdrelay.trace)


def _single(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    """The prompt itself, out of a list of one. Raises RequestError for several."""
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(item, int) for item in prompt):
        return prompt  # type: ignore[return-value]  # mypy does not narrow elements
    if len(prompt) == 1:
        (only,) = prompt
        assert not isinstance(only, int)
        return only
    if any(isinstance(item, int) for item in prompt):
        raise RequestError("prompt mixes token ids and texts: send one or the other.", param="prompt")
    raise RequestError(
        f"prompt has {len(prompt)} elements; only one is supported. Send one request for each.", param="prompt"
    )


def _control_error(name: str, complaint: str) -> RequestError:
    return RequestError(f"pdrelay.{name} {complaint}", param=f"pdrelay.{name}", code="debug_control")
