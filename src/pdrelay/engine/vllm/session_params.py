"""What the endpoint plug-in tells our scheduler about a session's chunk, in `SamplingParams.extra_args`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

EAGER = "pdrelay_eager"
"""Output tokens, known when the request is opened; a list of token ids."""

DISCARD = "pdrelay_discard"
"""True: the chunk's one sample is the engine's prediction; part of the output only if it comes back as a token."""

REASONING = "pdrelay_reasoning"
"""`reasoning_ended` and `reasoning_parser_kwargs`, which vLLM does not take for requests that come in chunks."""


def eager(params: SamplingParams | None) -> list[int]:
    """The output tokens that a new request has already."""
    return list(_extra(params).get(EAGER, ()))


def discards(params: SamplingParams | None) -> bool:
    """Whether a chunk's sample is thrown away."""
    return bool(_extra(params).get(DISCARD))


def reasoning(params: SamplingParams | None) -> tuple[bool | None, dict[str, Any] | None] | None:
    """`reasoning_ended` and `reasoning_parser_kwargs`, if given."""
    told = _extra(params).get(REASONING)
    return None if told is None else (told[0], told[1])


def _extra(params: SamplingParams | None) -> dict[str, Any]:
    return (params and params.extra_args) or {}
