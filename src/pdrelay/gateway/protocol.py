"""Requests of the OpenAI API, as far as this server takes them, with vLLM's extra parameters.

Absent and null mean the same: the default. `gateway/parse.py` turns bytes into these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdrelay.policy.base import Pipeline


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content."""

    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far on every chunk
    include_obfuscation: bool = False  # padding against observers of the line; TLS is in front of this server


class Extension(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `pdrelay` parameter. All but `trace` and `max_gap_ms` are `gateway/base.py` DebugControls."""

    trace: bool = False
    max_gap_ms: float = 0.0  # longest pause between tokens that this client accepts; 0: it does not say
    pipeline: Pipeline | None = None
    handoff_mode: Literal["one_shot", "catch_up"] | None = None
    handoff_at: int | None = None


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both endpoints. None stands for the model's default (`gateway/defaults.py`)."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    pdrelay: Extension = Extension()


class ChatRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, object] = {}


class CompletionRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool = True


# Parameters that cannot change the output of this server, so that leaving them aside is honest.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Parameters that are taken only at values that ask for nothing.
NEUTRAL_ONLY: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
