"""Sampling parameters of a session in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from pdrelay.engine.messages import Sampling, StructuredOutput
from pdrelay.engine.vllm import session_params
from pdrelay.errors import EngineRejectedError

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_OURS = {"structured", "prompt_logprobs"}  # fields of Sampling that vLLM spells otherwise
_REASONING = ("reasoning_ended", "reasoning_parser_kwargs")


def to_vllm(
    sampling: Sampling,
    max_tokens: int,
    extra_args: Mapping[str, object] | None = None,
    *,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """`sampling` with another `max_tokens`. Raises EngineRejectedError with vLLM's message for invalid values."""
    if sampling.max_tokens < sampling.min_tokens:
        raise EngineRejectedError(
            f"min_tokens must be less than or equal to max_tokens={sampling.max_tokens}, got {sampling.min_tokens}."
        )
    fields = {name: value for name, value in msgspec.structs.asdict(sampling).items() if name not in _OURS}
    # A chunk that samples one token to throw it away ends before min_tokens; vLLM wants min_tokens <= max_tokens.
    fields |= {"max_tokens": max_tokens, "min_tokens": min(sampling.min_tokens, max_tokens)}
    extra = dict(extra_args or {}) | _reasoning(sampling.structured)
    try:
        return SamplingParams(
            **fields,
            structured_outputs=_structured(sampling.structured),
            prompt_logprobs=prompt_logprobs,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
        )
    except (ValueError, VLLMClientError) as error:
        raise EngineRejectedError(str(error)) from error


def _structured(wanted: StructuredOutput | None) -> StructuredOutputsParams | None:
    # A new object for each use: vLLM writes into it.
    if wanted is None:
        return None
    fields = msgspec.structs.asdict(wanted)
    return StructuredOutputsParams(**{name: value for name, value in fields.items() if name not in _REASONING})


def _reasoning(wanted: StructuredOutput | None) -> dict[str, object]:
    if wanted is None or (wanted.reasoning_ended is None and wanted.reasoning_parser_kwargs is None):
        return {}
    return {session_params.REASONING: [wanted.reasoning_ended, wanted.reasoning_parser_kwargs]}


SAME = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids"),
    *("ignore_eos", "logprobs", "prompt_logprobs"),
)
"""Fields that mean the same in both forms."""

UNKNOWN = ("thinking_token_budget", "repetition_detection", "logprob_token_ids", "prompt_logprob_token_ids")
"""Fields of vLLM's that change the output and have no counterpart here."""


def from_vllm(request: EngineCoreRequest) -> Sampling:
    """The sampling parameters of a request that vLLM's front end has prepared. Raises VLLMValidationError."""
    params = request.sampling_params
    for name in UNKNOWN:
        if getattr(params, name) is not None:
            raise VLLMValidationError(f"{name} is not supported.", parameter=name)
    return Sampling(
        **{name: getattr(params, name) for name in SAME},
        structured=_from_structured(request, params.structured_outputs),
    )


def _from_structured(request: EngineCoreRequest, outputs: StructuredOutputsParams | None) -> StructuredOutput | None:
    if outputs is None or outputs.all_constraints_none():
        return None
    names = [name for name in StructuredOutput.__struct_fields__ if name not in _REASONING]
    fields = {name: getattr(outputs, name) for name in names}
    if isinstance(fields["json"], dict):
        fields["json"] = json.dumps(fields["json"])
    told = {name: getattr(request, name) for name in _REASONING}
    return StructuredOutput(**fields, **told)
