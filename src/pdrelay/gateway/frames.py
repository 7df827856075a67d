"""Bodies and SSE frames of one response.

Most frames of a stream differ in their text only, so what stands before and behind the text is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from pdrelay.gateway.output import Ending
from pdrelay.gateway.responses import (
    AssistantMessage,
    Body,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Choice,
    ChoiceLogprobs,
    Delta,
    Pdrelay,
    PromptLogprobs,
    TextChoice,
    TextLogprobs,
    Usage,
)

Endpoint = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
_HOLE = "\x00"  # stands for the text in the frame that is encoded once

_encoder = msgspec.json.Encoder()


class Head(NamedTuple):
    """What all bodies of one response share."""

    id: str
    created: int
    model: str
    fingerprint: str


class Extras(NamedTuple):
    """What a chunk or a choice carries besides text."""

    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


NOTHING = Extras()


class Done(NamedTuple):
    """A whole choice."""

    number: int
    text: str
    ending: Ending
    extras: Extras


class Frames:
    """Writes one response, whole or as a stream."""

    def __init__(self, endpoint: Endpoint, head: Head, *, choices: int = 1, usage: bool = False) -> None:
        """With `usage` every chunk of a stream has the field, null unless given, as OpenAI does."""
        self._chat, self._head, self._choices = endpoint == "chat", head, choices
        self._no_usage: UnsetType | None = None if usage else UNSET
        whole = [self._frame(self._text_choice(index, _HOLE, NOTHING)) for index in range(choices)]
        self._around = [frame.split(_encoder.encode(_HOLE)) for frame in whole]

    def opening(self, prompt_token_ids: list[int] | UnsetType = UNSET) -> bytes:
        """What a stream begins with: the role of each choice, at the chat endpoint."""
        if not self._chat:
            return b""
        roles = [
            ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")) for index in range(self._choices)
        ]
        return b"".join(self._frame(role, prompt_token_ids=prompt_token_ids) for role in roles)

    def text(self, index: int, text: str) -> bytes:
        """A chunk of text of a choice."""
        before, behind = self._around[index]
        return b"".join((before, _encoder.encode(text), behind))

    def around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the quoted text in a chunk of text of a choice."""
        before, behind = self._around[index]
        return before, behind

    def chunk(self, index: int, text: str, extras: Extras, mark: Pdrelay, usage: Usage | None) -> bytes:
        """A chunk that carries more than text."""
        return self._frame(self._text_choice(index, text, extras), usage or self._no_usage, mark)

    def finish(self, index: int, ending: Ending, pdrelay: Pdrelay = UNSET) -> bytes:
        """The last chunk of a choice."""
        return self._frame(self._finish_choice(index, ending), pdrelay=pdrelay)

    def usage(self, usage: Usage, pdrelay: Pdrelay) -> bytes:
        """The chunk without a choice that ends a stream whose client wants to know its usage."""
        return self._frame(None, usage, pdrelay)

    def body(self, choices: Sequence[Done], usage: Usage, pdrelay: Pdrelay) -> bytes:
        """The whole response at once."""
        kind = "chat.completion" if self._chat else "text_completion"
        extras = choices[0].extras if self._chat else NOTHING
        body = self._body(kind, [self._whole_choice(choice) for choice in choices], usage, pdrelay, extras)
        return _encoder.encode(body)

    def _whole_choice(self, done: Done) -> Choice:
        (reason, stop_reason), extras = done.ending, done.extras
        if not self._chat:
            choice = self._text_choice(done.number, done.text, extras)
            return msgspec.structs.replace(choice, finish_reason=reason, stop_reason=stop_reason)
        assert not isinstance(extras.logprobs, TextLogprobs)
        return ChatChoice(
            index=done.number,
            message=AssistantMessage(content=done.text),
            logprobs=extras.logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            token_ids=extras.token_ids,
        )

    def _text_choice(self, index: int, text: str, extras: Extras) -> Choice:
        logprobs = extras.logprobs
        if self._chat:
            assert not isinstance(logprobs, TextLogprobs)
            delta = Delta(content=text)
            return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, token_ids=extras.token_ids)
        assert not isinstance(logprobs, ChatLogprobs)
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=extras.prompt_logprobs,
            prompt_token_ids=extras.prompt_token_ids,
            token_ids=extras.token_ids,
        )

    def _finish_choice(self, index: int, ending: Ending) -> Choice:
        reason, stop_reason = ending
        if self._chat:
            return ChatChunkChoice(index=index, delta=Delta(), finish_reason=reason, stop_reason=stop_reason)
        return TextChoice(index=index, text="", finish_reason=reason, stop_reason=stop_reason)

    def _frame(
        self,
        choice: Choice | None,
        usage: Usage | UnsetType | None = UNSET,
        pdrelay: Pdrelay = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        extras = Extras(prompt_token_ids=prompt_token_ids)
        choices = [] if choice is None else [choice]
        return event(_encoder.encode(self._body(kind, choices, usage or self._no_usage, pdrelay, extras)))

    def _body(
        self, kind: str, choices: list[Choice], usage: Usage | UnsetType | None, pdrelay: Pdrelay, extras: Extras
    ) -> Body:
        head = self._head
        return Body(
            id=head.id,
            object=kind,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            prompt_logprobs=extras.prompt_logprobs,
            prompt_token_ids=extras.prompt_token_ids,
            usage=usage,
            pdrelay=pdrelay,
        )


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"".join((b"data: ", data, b"\n\n"))
