"""Chat templates as transformers renders them (`apply_chat_template`), without transformers.

The language is Jinja in a sandbox, with what transformers adds to it: `raise_exception`, `strftime_now`, a `tojson`
that escapes nothing, `break` and `continue`, and blocks between `generation` and `endgeneration`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Turn = dict[str, Any]
"""A message of a conversation: role, content, and whatever else the template reads."""

MARK = "PDRELAY_GOES_ON_HERE "
"""Stands at the end of an open message while it is rendered. The space shows whether the template trims messages."""


class ChatTemplate:
    """One template of a model. Safe in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str | list[str]]) -> None:
        """`special_tokens` are variables of the template, such as `bos_token`. Errors in `source` show on rendering."""
        self.source, self._special_tokens = source, special_tokens

    def render(
        self,
        conversation: list[Turn],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: object,
    ) -> str:
        """The prompt. `variables` go before special tokens of the same name.

        `continue_final_message` leaves the last message open behind its content, or behind the field that it names.
        Raises ValueError for what cannot be rendered so, jinja2.TemplateError, and whatever an expression of the
        template raises (TypeError, KeyError).
        """
        if not conversation:
            raise ValueError("the conversation is empty")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message leaves no room for the header of add_generation_prompt")
        template = self._compiled
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}

        def rendered(messages: list[Turn]) -> str:
            return template.render(**{**values, "messages": messages, "add_generation_prompt": add_generation_prompt})

        if not continue_final_message:
            return rendered(conversation)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        return self._left_open(conversation, field, rendered)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    def _left_open(self, conversation: list[Turn], field: str, rendered: Callable[[list[Turn]], str]) -> str:
        """The prompt up to the end of the last message's `field`."""
        if conversation[-1].get(field) is None:
            raise ValueError(f"continue_final_message: the last message has no {field!r}")
        if field not in self.source:
            raise ValueError(f"continue_final_message: the chat template does not know {field!r}")
        last = deepcopy(conversation[-1])
        final = _mark(last, field)
        prompt, mark = rendered([*conversation[:-1], last]), MARK.strip()
        if final.strip() not in prompt or mark not in prompt:
            raise ValueError(f"continue_final_message: the chat template changes or drops the last message's {field!r}")
        end = prompt.rindex(mark)
        return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()


def _mark(message: Turn, field: str) -> str:
    """Puts the mark behind the text of `field`, behind the last text if there are parts. The text without it."""
    content = message[field]
    if not isinstance(content, list | tuple):
        message[field] = content + MARK
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = part["text"]
            part["text"] = text + MARK
            return str(text)
    raise ValueError(f"continue_final_message: no part of the last message's {field!r} is text")


class _Generation(Extension):
    """`{% generation %}`: what the model wrote, which training looks for. Its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # the machine's own time, as templates expect
