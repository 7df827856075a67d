"""What a request says of the form of its output, in OpenAI's words and in vLLM's, as one StructuredOutput."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pdrelay.engine.messages import StructuredOutput
from pdrelay.errors import RequestError
from pdrelay.gateway.protocol import CommonRequest, ResponseFormat, StructuredOutputs

CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
GUIDED = ("json", "regex", "choice", "grammar")  # what older versions of vLLM took as `guided_...`


def structured_output(request: CommonRequest) -> StructuredOutput | None:
    """The constraint, if there is one. Raises RequestError unless it is one. Engines judge the grammar itself."""
    given: dict[str, Any] = {}
    outputs = request.structured_outputs or StructuredOutputs()
    for name in CONSTRAINTS:
        if (value := getattr(outputs, name)) is not None:
            given[f"structured_outputs.{name}"] = value
    for name in GUIDED:
        if (value := getattr(request, f"guided_{name}")) is not None:
            given[f"guided_{name}"] = value
    if (format_ := _of_format(request.response_format)) is not None:
        given[f"response_format.{format_[0]}"] = format_[1]
    if len(given) > 1:
        raise _wrong("structured_outputs", f"the output can have one constraint, got {', '.join(given)}.")
    if not given:
        if request.structured_outputs is not None:
            raise _wrong("structured_outputs", f"needs one of {', '.join(CONSTRAINTS)}.")
        return None
    ((place, value),) = given.items()
    name = place.rpartition(".")[2].removeprefix("guided_")
    options = {field: getattr(outputs, field) for field in outputs.__struct_fields__ if field not in CONSTRAINTS}
    constraint = {name: _text(value) if name == "json" else value}
    return msgspec.convert(constraint | options, StructuredOutput)


def _of_format(wanted: ResponseFormat | None) -> tuple[str, Any] | None:
    """The constraint of a `response_format`: its name and value."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json_object", True
    if wanted.type == "structural_tag":
        fields = ("type", "format", "structures", "triggers")
        return "structural_tag", json.dumps({f: v for f in fields if (v := getattr(wanted, f)) is not None})
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise _wrong("response_format", "of type json_schema needs json_schema.schema.")
    return "json", wanted.json_schema.schema_


def _text(schema: str | dict[str, Any]) -> str:
    # As vLLM writes it: the order of an object's keys is the order in which they are generated.
    return schema if isinstance(schema, str) else json.dumps(schema)


def _wrong(param: str, complaint: str) -> RequestError:
    return RequestError(f"{param} {complaint}", param=param, code="invalid_value")
