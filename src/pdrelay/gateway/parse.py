"""From bytes to a request: everything that can be said without the model. Every complaint names field and remedy."""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

import msgspec

from pdrelay.errors import RequestError
from pdrelay.gateway.protocol import IGNORED, NEUTRAL_ONLY, ChatRequest, CommonRequest, CompletionRequest

Fields = dict[str, object]
OURS = {"pdrelay", "cache_salt", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
Request = TypeVar("Request", bound=CommonRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Reads the body of a chat completion. Raises RequestError."""
    fields = _supported(_object(body), ChatRequest)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_without_nulls(item) if isinstance(item, dict) else item for item in messages]
    request = _convert(fields, ChatRequest)
    if not request.messages:
        raise RequestError("messages is empty: send at least one message.", param="messages", code="empty_array")
    for index, message in enumerate(request.messages):
        if message.content is None and not message.tool_calls:
            name = f"messages[{index}].content"
            raise RequestError(f"{name} is required.", param=name, code="missing_required_parameter")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        raise RequestError("tool_choice needs tools.", param="tool_choice", code="invalid_value")
    return request


def for_serving(body: bytes, served_model: str, request_id: str) -> bytes:
    """The body of a chat completion that passed `parse_chat`, as vLLM's serving layer is asked.

    What is ours or changes nothing stays behind, older names are put in the newer form.
    """
    given = _object(body)
    fields = {
        name: value for name, value in given.items() if name in ChatRequest.__struct_fields__ and name not in OURS
    }
    for name in ("json", "regex", "choice", "grammar"):
        if (value := given.get(f"guided_{name}")) is not None:
            fields["structured_outputs"] = {name: value}
    if not fields.get("tools"):
        fields = {name: value for name, value in fields.items() if name not in ("tools", "tool_choice")}
    return msgspec.json.encode(fields | {"model": served_model, "request_id": request_id})


def parse_completion(body: bytes) -> CompletionRequest:
    """Reads the body of a completion. Raises RequestError."""
    return _convert(_supported(_object(body), CompletionRequest), CompletionRequest)


def _object(body: bytes) -> Fields:
    try:
        raw = msgspec.json.decode(body)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}. Send one JSON object in UTF-8.") from error
    if not isinstance(raw, dict):
        raise RequestError(f"The body must be a JSON object, got {_kind(raw)}.")
    return {name: value for name, value in raw.items() if value is not None}


def _supported(fields: Fields, model: type[CommonRequest]) -> Fields:
    """The fields of `model`; complains about others, drops those that ask for nothing."""
    kept: Fields = {}
    for name, value in fields.items():
        if name in model.__struct_fields__:
            kept[name] = value
        elif name in NEUTRAL_ONLY:
            _refuse_unless_neutral(name, value)
        elif name not in IGNORED:
            raise _unknown(name, model)
    return kept


def _refuse_unless_neutral(name: str, value: object) -> None:
    neutral = NEUTRAL_ONLY[name]
    if any(type(value) is type(allowed) and value == allowed for allowed in neutral):
        return
    remedy = f"Use {' or '.join(_json(allowed) for allowed in neutral)}, or leave it out." if neutral else "Remove it."
    raise RequestError(f"{name}={_short(value)} is not supported. {remedy}", param=name, code="unsupported_parameter")


def _unknown(name: str, model: type[CommonRequest]) -> RequestError:
    known = [*model.__struct_fields__, *NEUTRAL_ONLY, *IGNORED]
    close = difflib.get_close_matches(name[:64], known, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Remove it."
    return RequestError(f"Unknown parameter: {name[:64]!r}. {remedy}", param=name[:64], code="unknown_parameter")


def _without_nulls(message: Fields) -> Fields:
    """An assistant's message as the SDK echoes it carries many fields that say nothing."""
    return {name: value for name, value in message.items() if value is not None and value != []}


def _convert(fields: Fields, model: type[Request]) -> Request:
    try:
        return msgspec.convert(fields, model)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error


_PATH = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"`([^`]*)`$")


def _type_error(message: str) -> RequestError:
    """Puts msgspec's `Expected ..., got ... - at ...` into the words of this API."""
    match = _PATH.fullmatch(message)
    assert match is not None
    what, path = match["what"].replace(" | null", ""), match["path"] or ""
    if field := _FIELD.search(what):
        name = f"{path}.{field[1]}".lstrip(".")
        if "missing required field" in what:
            return RequestError(f"{name} is required.", param=name, code="missing_required_parameter")
        if "unknown field" in what:
            return RequestError(_unknown_nested(name), param=name, code="unknown_parameter")
    if ".content[" in path and path.endswith(".type"):
        what = "only content parts of type `text` are supported; remove images, audio and files"
    elif "nvalid enum value" in what:
        what = f"{what}, expected one of {_choices(path)}"
    return RequestError(f"{path}: {what.replace('`', '')}.", param=path or None, code="invalid_type")


def _unknown_nested(name: str) -> str:
    if name.endswith(".function_call"):
        return f"{name}: send tool_calls instead."
    return f"Unknown parameter: {name!r}. Remove it."


_CHOICES = {
    "role": "'system', 'developer', 'user', 'assistant', 'tool'",
    "type": "'text', 'json_object', 'json_schema', 'structural_tag'",
    "pipeline": "'p_md', 'p_rld_md', 'p_d'",
    "handoff_mode": "'one_shot', 'catch_up'",
}


def _choices(path: str) -> str:
    return _CHOICES[path.rpartition(".")[2]]


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _short(value: object) -> str:
    text = _json(value)
    return text if len(text) <= 60 else text[:57] + "..."
