"""Requests of the OpenAI API, as far as this server takes them, with vLLM's extra parameters.

Absent and null mean the same: the default. `gateway/parse.py` turns bytes into these.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdrelay.policy.base import Pipeline


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content."""

    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation. Only an assistant's that calls tools may be without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = [] if self.content is None else self.content
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)

    @property
    def needs_serving(self) -> bool:
        """Whether it has parts that only vLLM's serving layer renders."""
        reasons = bool(self.reasoning or self.reasoning_content)
        return self.role == "tool" or bool(self.tool_calls) or reasons


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


Json = dict[str, Any]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; one constraint of it is given."""

    json: str | Json | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """The `json_schema` of a response format."""

    name: str
    schema_: Json | None = None
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`, with vLLM's structural tags (`format`, or `structures` and `triggers`)."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Any = None
    structures: list[Json] | None = None
    triggers: list[str] | None = None


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both endpoints. None stands for the model's default (`gateway/defaults.py`)."""

    model: str | None = None
    n: int = 1
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    echo: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
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
    logprobs: bool = False
    top_logprobs: int = 0
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, object] = {}
    tools: list[Json] = []
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @property
    def needs_serving(self) -> bool:
        """Whether only vLLM's serving layer can render it, or take its answer apart."""
        asks = bool(self.tools) or self.reasoning_effort is not None or not self.include_reasoning
        return asks or any(message.needs_serving for message in self.messages)


class CompletionRequest(CommonRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True


# Parameters that cannot change the output of this server, so that leaving them aside is honest.
IGNORED = frozenset(
    {
        "metadata",
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
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "parallel_tool_calls": (True, False),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
