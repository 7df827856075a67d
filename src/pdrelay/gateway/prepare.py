"""From a parsed request to a GenerationRequest: the last checks before any engine works."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdrelay.engine.messages import Sampling
from pdrelay.engine.serving import Generate
from pdrelay.errors import RequestError
from pdrelay.gateway.base import DebugControls, GenerationRequest, Generator
from pdrelay.gateway.choice import Planned
from pdrelay.gateway.detokenise import Detokeniser
from pdrelay.gateway.output import Output
from pdrelay.gateway.parse import for_serving
from pdrelay.gateway.protocol import ChatRequest, CommonRequest, CompletionRequest, Extension
from pdrelay.gateway.sampling import (
    Limits,
    check_parameters,
    check_prompt,
    check_token_ids,
    sampling_for,
    stop_strings,
    wanted_logprobs,
    wanted_prompt_logprobs,
)
from pdrelay.gateway.served import Served
from pdrelay.gateway.text import Text
from pdrelay.policy.base import Pipeline

INLINE_CHARS = 8192  # longer texts are tokenised in a thread, so that other streams go on
MAX_CACHE_SALT = 1024
MAX_CHOICES = 128  # of one request, over all its prompts; OpenAI's limit of `n`


class Wanted(NamedTuple):
    """How the client wants its answer."""

    chat: bool
    n: int  # choices for each prompt
    stream: bool
    usage: bool
    continuous_usage: bool
    trace: bool
    logprobs: int | None  # likeliest tokens beside each; None for no log probabilities
    prompt_logprobs: bool
    token_ids: bool

    @property
    def only_text(self) -> bool:
        """Whether the chunks of a stream carry nothing but text."""
        return not (self.continuous_usage or self.trace or self.token_ids or self.logprobs is not None)


class Prepared(NamedTuple):
    """A request that passed every check. Choices of one prompt stand together."""

    wanted: Wanted
    choices: list[Planned]


class Prompt(NamedTuple):
    """One prompt, and its text if the answer is to repeat it."""

    ids: list[int]
    echo: str | None


class Preparer:
    """Checks requests against the model and what the deployment holds."""

    def __init__(
        self, generator: Generator, text: Text, model_name: str, *, debug: bool, adapters: Sequence[str] = ()
    ) -> None:
        self._generator, self._text, self._model, self._debug = generator, text, model_name, debug
        self._adapters = adapters

    @property
    def limits(self) -> Limits:
        """As they are now: engines that come up may change them."""
        generator = self._generator
        return Limits(generator.max_model_len, generator.max_prompt_tokens, self._text.vocab_size)

    async def prepare(self, request: ChatRequest | CompletionRequest, request_id: str, arrival: float) -> Prepared:
        """Checks and tokenises. Raises RequestError."""
        limits = self.limits
        common = self._checked(request, limits, arrival)
        if isinstance(request, ChatRequest):
            prompts = [await self._chat_prompt(request, limits)]
        else:
            prompts = [await self._prompt(prompt, request, limits) for prompt in _prompts(request.prompt)]
        _check_choices(len(prompts) * request.n)
        choices: list[Planned] = []
        for prompt in prompts:
            sampling = sampling_for(request, len(prompt.ids), limits, self._text.defaults)
            for number in range(request.n):
                own_id = request_id if len(prompts) * request.n == 1 else f"{request_id}-{len(choices)}"
                generation = common._replace(request_id=own_id, prompt=prompt.ids, sampling=_nth(sampling, number))
                choices.append(self._planned(request, generation, prompt.echo))
        return Prepared(_wanted(request), choices)

    def serve(self, request: ChatRequest, body: bytes, request_id: str, arrival: float) -> Served:
        """Checks a request that vLLM's serving layer will render. Raises RequestError."""
        common = self._checked(request, self.limits, arrival)
        _check_choices(request.n)

        def plan(wanted: Generate, number: int) -> GenerationRequest:
            check_prompt(len(wanted.prompt), self.limits)
            own_id = request_id if request.n == 1 else f"{request_id}-{number}"
            return common._replace(request_id=own_id, prompt=wanted.prompt, sampling=wanted.sampling)

        own = for_serving(body, request.model or self._model, request_id.removeprefix("chatcmpl-"))
        return Served(request_id, own, request.pdrelay.trace, plan)

    def _checked(self, request: CommonRequest, limits: Limits, arrival: float) -> GenerationRequest:
        """Checks all that does not depend on the prompt; what the requests of all choices share."""
        self.check_model(request.model)
        check_parameters(request, limits.vocab_size)
        if len(request.cache_salt) > MAX_CACHE_SALT:
            raise RequestError(f"cache_salt must have at most {MAX_CACHE_SALT} characters.", param="cache_salt")
        debug = self._debug_controls(request.pdrelay)
        max_gap = request.pdrelay.max_gap_ms / 1000
        if max_gap < 0:
            raise RequestError("pdrelay.max_gap_ms must not be negative.", param="pdrelay.max_gap_ms")
        return GenerationRequest(
            request_id="",
            arrival=arrival,
            prompt=[],
            sampling=Sampling(max_tokens=1),
            cache_salt=request.cache_salt,
            debug=debug,
            max_gap=max_gap,
            lora=request.model if request.model and request.model in self._adapters else "",
        )

    def check_model(self, model: str | None) -> None:
        """Raises RequestError unless `model` is served: the model itself, or an adapter of it."""
        if model not in (None, self._model, *self._adapters):
            served = ", ".join(repr(name) for name in (self._model, *self._adapters))
            raise RequestError(
                f"The model {model!r} does not exist. This server serves {served}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _chat_prompt(self, request: ChatRequest, limits: Limits) -> Prompt:
        if request.add_generation_prompt and request.continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false: the last message is left open.",
                param="continue_final_message",
            )
        ids = await self._encode(self._text.render(request), request, limits)
        return Prompt(_not_empty(ids, "messages"), _echo_of_chat(request))

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest, limits: Limits) -> Prompt:
        if isinstance(prompt, str):
            ids = await self._encode(prompt, request, limits)
        else:
            ids = prompt
            check_token_ids("prompt", ids, limits.vocab_size)
        _not_empty(ids, "prompt")
        if not request.echo:
            return Prompt(ids, None)
        if request.return_token_ids:
            return Prompt(ids, "")  # the ids say it
        return Prompt(ids, prompt if isinstance(prompt, str) else self._text.decode(ids))

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

    def _planned(self, request: CommonRequest, generation: GenerationRequest, echo: str | None) -> Planned:
        output = self._output(request, generation)
        return Planned(generation, output, echo, echo_only=request.echo and request.max_tokens == 0)

    def _output(self, request: CommonRequest, generation: GenerationRequest) -> Output:
        sampling, eos = generation.sampling, self._text.defaults.eos
        stop_ids = set(sampling.stop_token_ids)
        if eos is not None and not sampling.ignore_eos:
            stop_ids.add(eos)
        return Output(
            Detokeniser(
                self._text.backend,
                generation.prompt,
                skip_special_tokens=request.skip_special_tokens,
                whole=self._text.whole,
            ),
            stop=stop_strings(request),
            stop_ids=frozenset(stop_ids),
            min_tokens=sampling.min_tokens,
            include_stop=request.include_stop_str_in_output,
        )


def _wanted(request: ChatRequest | CompletionRequest) -> Wanted:
    options = request.stream_options
    usage = options is not None and options.include_usage
    return Wanted(
        chat=isinstance(request, ChatRequest),
        n=request.n,
        stream=request.stream,
        usage=usage,
        continuous_usage=options is not None and usage and options.continuous_usage_stats,
        trace=request.pdrelay.trace,
        logprobs=wanted_logprobs(request),
        prompt_logprobs=wanted_prompt_logprobs(request) is not None,
        token_ids=request.return_token_ids,
    )


def _nth(sampling: Sampling, number: int) -> Sampling:
    """Of choice `number` of a prompt: choices with one seed would all be the same, so each has its own, as in vLLM."""
    if sampling.seed is None or not number:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + number)


def _prompts(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion: one as text or ids, or a list of such. Raises RequestError for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    numbers = sum(isinstance(item, int) for item in prompt)
    if numbers == len(prompt):
        return [prompt]  # type: ignore[list-item]  # mypy does not narrow elements
    if numbers:
        raise RequestError("prompt mixes token ids and texts: send one or the other.", param="prompt")
    return prompt  # type: ignore[return-value]  # the same


def _not_empty(ids: list[int], field: str) -> list[int]:
    if not ids:
        raise RequestError("The prompt is empty: send at least one token.", param=field)
    return ids


def _echo_of_chat(request: ChatRequest) -> str | None:
    """The last message, if the answer goes on with it."""
    last = request.messages[-1]
    if not request.echo or (request.add_generation_prompt and last.role != "assistant"):
        return None
    return last.text


def _check_choices(count: int) -> None:
    if count > MAX_CHOICES:
        raise RequestError(f"At most {MAX_CHOICES} choices can be made at once.", param="n", code="invalid_value")


def _control_error(name: str, complaint: str) -> RequestError:
    return RequestError(f"pdrelay.{name} {complaint}", param=f"pdrelay.{name}", code="debug_control")
