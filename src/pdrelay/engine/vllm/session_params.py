"""What the endpoint plug-in tells our scheduler about a session's chunk, in `SamplingParams.extra_args`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

EAGER = "pdrelay_eager"
"""Output tokens, known when the request is opened; a list of token ids."""

REPLAY = "pdrelay_replay"
"""True: the chunk brings no new token (its token is a filler); the last one is computed again for a new sample."""


def eager(params: SamplingParams | None) -> list[int]:
    """The output tokens that a new request has already."""
    return list(((params and params.extra_args) or {}).get(EAGER, ()))


def is_replay(params: SamplingParams | None) -> bool:
    """Whether a chunk brings no new token."""
    return bool(((params and params.extra_args) or {}).get(REPLAY))
