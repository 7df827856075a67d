"""Sampling parameters of a session in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from pdrelay.engine.messages import Sampling
from pdrelay.errors import EngineRejectedError


def to_vllm(sampling: Sampling, max_tokens: int, extra_args: Mapping[str, object] | None = None) -> SamplingParams:
    """`sampling` with another `max_tokens`. Raises EngineRejectedError with vLLM's message for invalid values."""
    if sampling.max_tokens < sampling.min_tokens:
        raise EngineRejectedError(
            f"min_tokens must be less than or equal to max_tokens={sampling.max_tokens}, got {sampling.min_tokens}."
        )
    fields = msgspec.structs.asdict(sampling)
    # A chunk that samples one token to throw it away ends before min_tokens; vLLM wants min_tokens <= max_tokens.
    fields |= {"max_tokens": max_tokens, "min_tokens": min(sampling.min_tokens, max_tokens)}
    try:
        return SamplingParams(
            **fields, detokenize=False, output_kind=RequestOutputKind.DELTA, extra_args=dict(extra_args or {}) or None
        )
    except (ValueError, VLLMClientError) as error:
        raise EngineRejectedError(str(error)) from error
