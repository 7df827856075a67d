"""Every parameter that must mean the same across a handoff, as requests to put to two servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EOS = 2

Json = dict[str, Any]
PROMPT = "The history of the Roman Empire begins with the founding of the city, and every spring the water rose."
MESSAGES = [{"role": "user", "content": "Tell me about the river in one sentence."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Rome", "Carthage", "Alexandria"]},
        "year": {"enum": [100, 200, 300]},
    },
    "required": ["name", "year"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "find_city", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "find_city"}}
CALLING: Json = {"tools": TOOLS, "max_tokens": 70, "ignore_eos": False}
CALL = {"id": "x", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
AFTER_A_CALL = [
    *MESSAGES,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "content": "stopped"},
]
CHOICES = ["a long and winding river in the north", "a long and dusty road to the south"]
CALLED = (
    r'<tool_call>\{"name": "find_city", '
    r'"arguments": \{"name": "Rome", "year": (100|200)\}\}</tool_call>'
)
EBNF = 'root ::= item item item item\nitem ::= "(" [a-f] [a-f] ":" [0-9] ") "\n'
CHARACTERS = "你好, 世界 😀é🎉 ñandú 👩‍🚀"


def formed(outputs: Json, tokens: int, **more: Any) -> Json:
    """A request whose output has a form."""
    return {"structured_outputs": outputs, "max_tokens": tokens, "ignore_eos": False, **more}


@dataclass(frozen=True)
class Row:
    """One parameter: a request, and what the docs say of it. `shows` are the parameters that it covers.

    `for_seam` changes the request for a seam, given the ids of the plain answer. With `first_only` all happens
    before any seam: the answer may end at token 0.
    """

    shows: str
    body: Json
    path: str = COMPLETION
    stream: bool | None = None  # None: half of the seams are streamed
    first_only: bool = False
    for_seam: Callable[[list[int], int, Callable[[list[int]], str]], Json] | None = None
    fixed: Json = field(default_factory=dict)

    def request(self, tokens: int) -> Json:
        """The request, for an output of `tokens` tokens unless the row has a length of its own."""
        base: Json = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        base |= {"prompt": PROMPT} if self.path == COMPLETION else {"messages": MESSAGES}
        return base | self.body


def _stop_at(ids: list[int], seam: int, text: Callable[[list[int]], str]) -> Json:
    """A stop string half of which the relay makes: from inside the token before the seam into the one at it."""
    before, at = text(ids[seam - 1 : seam]), text(ids[seam : seam + 1])
    return {"stop": [before[-2:] + at[:2]]}


def _stop_id_after(ids: list[int], seam: int, text: Callable[[list[int]], str]) -> Json:
    place = next((i for i in range(seam, len(ids)) if ids[i] not in ids[:i]), None)
    return {} if place is None else {"stop_token_ids": [ids[place]]}


def _min_tokens_over(ids: list[int], seam: int, text: Callable[[list[int]], str]) -> Json:
    """A token that comes before the seam must not stop; the first one behind it that repeats one does."""
    return {"stop_token_ids": sorted(set(ids[:seam])), "min_tokens": seam + 1}


PLAIN: dict[str, Row] = {
    "greedy": Row("temperature 0", {}),
    "temperature": Row("temperature with seed", {"temperature": 0.8, "seed": 42}),
    "top-p": Row("top_p with seed", {"temperature": 1.0, "top_p": 0.8, "seed": 1}),
    "top-k": Row("top_k with seed", {"temperature": 1.2, "top_k": 7, "seed": 2}),
    "min-p": Row("min_p with seed", {"temperature": 1.2, "min_p": 0.05, "seed": -3}),
    "penalties": Row(
        "presence_penalty, frequency_penalty, repetition_penalty",
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.15},
    ),
    "penalties seeded": Row(
        "penalties with seed", {"temperature": 0.9, "seed": 11, "presence_penalty": 0.9, "frequency_penalty": -0.4}
    ),
    "logit_bias": Row("logit_bias", {"logit_bias": {"260": -100, "282": 4, "284": -3.5}}),
    "allowed_token_ids": Row("allowed_token_ids", {"allowed_token_ids": list(range(100, 20000, 7))}),
    "bad_words": Row("bad_words", {"bad_words": [" the", " river was", " Roman Empire"]}),
    "min_tokens": Row("min_tokens", {}, for_seam=_min_tokens_over),
    "min_tokens eos": Row("min_tokens with EOS", {"ignore_eos": False, "logit_bias": {"2": 100}, "min_tokens": 12}),
    "max_tokens 1": Row("max_tokens=1", {"max_tokens": 1}, first_only=True),
    "length": Row("max_tokens", {"max_tokens": 11}),
    "stop": Row("stop, straddling the seam", {}, for_seam=_stop_at),
    "stop included": Row("include_stop_str_in_output", {"include_stop_str_in_output": True}, for_seam=_stop_at),
    "stop_token_ids": Row("stop_token_ids", {}, for_seam=_stop_id_after),
    "eos first": Row("EOS as first token", {"ignore_eos": False, "logit_bias": {"2": 100}}, first_only=True),
    "ignore_eos": Row("ignore_eos", {"logit_bias": {"2": 9}, "skip_special_tokens": False}),
    "logprobs": Row("logprobs of completions", {"logprobs": 3}),
    "logprobs seeded": Row("logprobs with seed", {"logprobs": 0, "temperature": 1.0, "seed": 5}),
    "chat logprobs": Row("logprobs, top_logprobs of chats", {"logprobs": True, "top_logprobs": 4}, CHAT),
    "prompt_logprobs": Row("prompt_logprobs", {"prompt_logprobs": 2}, stream=False),
    "echo": Row("echo with logprobs", {"echo": True, "logprobs": 1, "return_token_ids": False}),
    "echo only": Row(
        "echo with max_tokens=0",
        {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": False},
        first_only=True,
    ),
    "n": Row("n with seed", {"n": 3, "temperature": 0.9, "seed": 100}),
    "chat n": Row("n of chats", {"n": 2, "temperature": 0.9, "seed": 7}, CHAT),
    "prompts": Row("several prompts", {"prompt": [PROMPT, "Once upon a time"], "max_tokens": 10}),
    "json schema": Row(
        "response_format json_schema",
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
            "max_tokens": 60,
            "ignore_eos": False,
        },
        CHAT,
    ),
    "regex": Row("structured_outputs regex", formed({"regex": "[a-z]{3}-[0-9]{9}-[A-Z]{6}"}, 40)),
    "choice": Row("structured_outputs choice", formed({"choice": CHOICES}, 40)),
    "grammar": Row("structured_outputs grammar", formed({"grammar": EBNF}, 40)),
    "characters": Row("multi-byte characters", formed({"choice": [CHARACTERS]}, 60, logprobs=2)),
    "chat": Row("plain chat, usage", {"stop": ["Zzz"], "ignore_eos": False}, CHAT),
    "tools": Row("tools, tool_choice required", {**CALLING, "tool_choice": "required"}, CHAT),
    "tool named": Row("tool_choice with a function's name", {**CALLING, "tool_choice": NAMED}, CHAT),
    "tool auto": Row("tool_choice auto, streamed arguments", {**CALLING, **formed({"regex": CALLED}, 70)}, CHAT),
    "tool turn": Row(
        "tool messages; stop, logprobs through the serving layer",
        {**CALLING, "messages": AFTER_A_CALL, "tool_choice": "none", "logprobs": True, "top_logprobs": 2,
         "stop": ["Zzz"], "max_tokens": 14},
        CHAT,
    ),
}  # fmt: skip
"""Rows of a deployment whose model does not reason: plain chats are rendered and written by the gateway."""

THINK_END = {"logit_bias": {"8": 14}, "ignore_eos": False}
"""The model is drawn to the end of its reasoning."""

REASONING: dict[str, Row] = {
    "reasoning": Row("reasoning content, then content", {**THINK_END, "logprobs": True, "top_logprobs": 2}, CHAT),
    "only reasoning": Row("reasoning content up to max_tokens", {}, CHAT),
    "reasoning hidden": Row("include_reasoning=false", {**THINK_END, "include_reasoning": False}, CHAT),
    "reasoning schema": Row(
        "reasoning, then response_format json_schema",
        {**THINK_END, "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
         "max_tokens": 60},
        CHAT,
    ),
    "reasoning tool": Row("reasoning and a required tool", {**CALLING, **THINK_END, "tool_choice": "required"}, CHAT),
    "reasoning seeded": Row("reasoning with seed, n", {**THINK_END, "temperature": 0.9, "seed": 4, "n": 2}, CHAT),
}  # fmt: skip
"""Rows of a deployment with a reasoning parser: vLLM's serving layer writes every chat."""

ROWS = PLAIN | REASONING


# ---- answers ----


def ask(client: httpx.Client, model: str, path: str, body: Json, *, stream: bool) -> Json:
    """The answer, a stream put together again, without what must differ between servers."""
    body = body | {"model": model}
    if not stream:
        response = client.post(path, json=body)
        return normal(response.json(), response.status_code)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    joined: Json = {"choices": {}}
    with client.stream("POST", path, json=body | options) as response:
        if response.status_code != 200:
            response.read()
            return normal(response.json(), response.status_code)
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                _join(joined, json.loads(line.removeprefix("data: ")))
    joined["choices"] = [joined["choices"][index] for index in sorted(joined["choices"])]
    return normal(joined, 200)


def _join(joined: Json, chunk: Json) -> None:
    if "error" in chunk:
        joined["error"] = chunk["error"]
    if chunk.get("usage"):
        joined["usage"] = chunk["usage"]
    if chunk.get("pdrelay", {}).get("pipeline") or chunk.get("pdrelay", {}).get("choices"):
        joined["pdrelay"] = chunk["pdrelay"]
    if chunk.get("prompt_token_ids"):
        joined["prompt_token_ids"] = chunk["prompt_token_ids"]
    for part in chunk.get("choices", []):
        choice = joined["choices"].setdefault(part["index"], {"message": {}, "text": "", "token_ids": []})
        for key in ("finish_reason", "stop_reason", "prompt_token_ids"):
            if part.get(key) is not None:
                choice[key] = part[key]
        choice["text"] += part.get("text") or ""
        choice["token_ids"] += part.get("token_ids") or []
        _join_delta(choice["message"], part.get("delta") or {})
        for key, values in (part.get("logprobs") or {}).items():
            choice.setdefault("logprobs", {}).setdefault(key, []).extend(values)


def _join_delta(message: Json, delta: Json) -> None:
    for key in ("content", "reasoning"):
        if delta.get(key):
            message[key] = message.get(key, "") + delta[key]
    for call in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"function": {"name": "", "arguments": ""}})
        for key in ("name", "arguments"):
            calls[call["index"]]["function"][key] += (call.get("function") or {}).get(key) or ""


def normal(answer: Json, status: int) -> Json:
    """What two servers must agree on. `trace` is ours alone."""
    if status != 200 or "error" in answer:
        return {"status": status, "error": answer.get("error")}
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return {
        "choices": [_normal_choice(choice) for choice in answer["choices"]],
        "prompt_logprobs": answer.get("prompt_logprobs"),
        "prompt_token_ids": answer.get("prompt_token_ids"),
        "usage": [usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0],
        "trace": answer.get("pdrelay"),
    }


def _normal_choice(choice: Json) -> Json:
    message = choice.get("message") or {}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "text": choice.get("text") or message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "tool_calls": [(call["name"], call["arguments"]) for call in calls],
        "finish": (choice["finish_reason"], choice.get("stop_reason")),
        "token_ids": choice.get("token_ids") or [],
        "prompt_token_ids": choice.get("prompt_token_ids"),
        "logprobs": choice.get("logprobs"),
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


TOLERANCE = 2e-3
"""Of log probabilities in float32: another batch shape adds up in another order."""


MASKED = -9999.0
"""What vLLM tells of a token that a grammar forbids."""


def _alike(answer: Json) -> Json:
    """A part of an answer without the names of forbidden tokens: all are as unlikely, so which of them stand beside the
    likeliest is chance."""
    if answer.get("logprob") == MASKED:
        return {"logprob": MASKED}
    names = {key: f"forbidden {n}" for n, key in enumerate(key for key in answer if answer[key] == MASKED)}
    return {names.get(key, key): value for key, value in answer.items()}


def differences(expected: Any, found: Any, place: str = "") -> list[str]:
    """Where two answers differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        expected, found = _alike(expected), _alike(found)
    if isinstance(expected, float) and isinstance(found, float | int):
        return [] if abs(expected - found) <= TOLERANCE else [f"{place}: {found} instead of {expected}"]
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [
            line
            for key in expected
            if key != "trace"
            for line in differences(expected[key], found[key], f"{place}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            line
            for i, (a, b) in enumerate(zip(expected, found, strict=True))
            for line in differences(a, b, f"{place}[{i}]")
        ]
    return [] if expected == found else [f"{place}: {str(found)[:300]} instead of {str(expected)[:300]}"]
