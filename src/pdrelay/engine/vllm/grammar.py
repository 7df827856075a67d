"""Grammars of requests whose output partly comes from another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdrelay.engine.vllm import session_params

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager


class SessionGrammars:
    """vLLM's manager of structured output, except that no grammar hears of samples that are thrown away.

    INV-GRAMMAR-1: a grammar has taken the request's output tokens, each once and in order, and no other. Not every
    backend of vLLM can take tokens back exactly, in particular at the end of the grammar.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """The engine has sampled; False when the grammar forbids it."""
        if session_params.discards(request.sampling_params):
            return True
        return self.feed(request, new_token_ids)

    def feed(self, request: Request, tokens: list[int]) -> bool:
        """`tokens` were appended to the request's output; False when the grammar forbids them."""
        accepted: bool = self._manager.accept_tokens(request, tokens)
        return accepted


def set_reasoning(request: Request) -> None:
    """Hands a new request's structured output what vLLM's front end found out about its reasoning."""
    told = session_params.reasoning(request.sampling_params)
    if told is not None and request.structured_output_request is not None:
        request.structured_output_request.reasoning_ended = told[0]
        request.structured_output_request.reasoning_parser_kwargs = told[1]
