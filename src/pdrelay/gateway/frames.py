"""Bodies and SSE frames of one response.

Most frames of a stream differ in their text only, so what stands before and behind the text is encoded once.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from pdrelay.gateway.base import TokenBatch, Trace
from pdrelay.gateway.output import Ending
from pdrelay.gateway.responses import (
    AssistantMessage,
    Body,
    ChatChoice,
    ChatChunkChoice,
    Choice,
    Delta,
    Pdrelay,
    TextChoice,
    TokenMark,
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


class Frames:
    """Writes one response, whole or as a stream."""

    def __init__(self, endpoint: Endpoint, head: Head, *, usage: bool = False) -> None:
        """With `usage` every chunk of a stream has the field, null unless given, as OpenAI does."""
        self._chat, self._head = endpoint == "chat", head
        self._no_usage: UnsetType | None = None if usage else UNSET
        whole = self._frame(self._text_choice(_HOLE), self._no_usage, UNSET)
        self._before, _, self._behind = whole.partition(_encoder.encode(_HOLE))

    def opening(self) -> bytes:
        """What a stream begins with: the role, at the chat endpoint."""
        if not self._chat:
            return b""
        return self._frame(ChatChunkChoice(delta=Delta(role="assistant", content="")), self._no_usage, UNSET)

    def text(self, text: str) -> bytes:
        """A chunk of text."""
        return b"".join((self._before, _encoder.encode(text), self._behind))

    def marked(self, text: str, batch: TokenBatch | None, usage: Usage | None) -> bytes:
        """A chunk of text that says who made the tokens or what was used so far."""
        mark: Pdrelay = UNSET if batch is None else TokenMark(batch.tier.value, batch.index)
        return self._frame(self._text_choice(text), usage or self._no_usage, mark)

    def closing(self, ending: Ending, usage: Usage | None, trace: Trace | None) -> bytes:
        """The chunk with the finish reason, then one with `usage` if given; the last carries `trace`."""
        pdrelay: Pdrelay = trace or UNSET
        if usage is None:
            return self._frame(self._finish_choice(ending), self._no_usage, pdrelay) + DONE
        finish = self._frame(self._finish_choice(ending), self._no_usage, UNSET)
        return finish + self._frame(None, usage, pdrelay) + DONE

    def body(self, text: str, ending: Ending, usage: Usage, trace: Trace | None) -> bytes:
        """The whole response at once."""
        reason, stop_reason = ending
        choice: Choice
        if self._chat:
            message = AssistantMessage(content=text)
            choice = ChatChoice(message=message, finish_reason=reason, stop_reason=stop_reason)
        else:
            choice = TextChoice(text=text, finish_reason=reason, stop_reason=stop_reason)
        kind = "chat.completion" if self._chat else "text_completion"
        return _encoder.encode(self._body(kind, choice, usage, trace or UNSET))

    def _text_choice(self, text: str) -> Choice:
        return ChatChunkChoice(delta=Delta(content=text)) if self._chat else TextChoice(text=text)

    def _finish_choice(self, ending: Ending) -> Choice:
        reason, stop_reason = ending
        if self._chat:
            return ChatChunkChoice(delta=Delta(), finish_reason=reason, stop_reason=stop_reason)
        return TextChoice(text="", finish_reason=reason, stop_reason=stop_reason)

    def _frame(self, choice: Choice | None, usage: Usage | UnsetType | None, pdrelay: Pdrelay) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return event(_encoder.encode(self._body(kind, choice, usage, pdrelay)))

    def _body(self, kind: str, choice: Choice | None, usage: Usage | UnsetType | None, pdrelay: Pdrelay) -> Body:
        head = self._head
        return Body(
            id=head.id,
            object=kind,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[] if choice is None else [choice],
            usage=usage,
            pdrelay=pdrelay,
        )


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"".join((b"data: ", data, b"\n\n"))
