"""One request's answer on the wire: runs its choices to their end, or until the client has gone."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from pdrelay.errors import PdrelayError
from pdrelay.gateway.base import Trace
from pdrelay.gateway.choice import Choice, Piece, merged
from pdrelay.gateway.direct import Direct, direct_of
from pdrelay.gateway.frames import DONE, Done, Extras, Frames
from pdrelay.gateway.logprobs import Position, chat_logprobs, prompt_logprobs, text_logprobs
from pdrelay.gateway.metrics import Meter
from pdrelay.gateway.prepare import Wanted
from pdrelay.gateway.responses import ChoiceLogprobs, Pdrelay, TokenMark, Traces, Usage, usage_of
from pdrelay.gateway.straight import Straight
from pdrelay.gateway.text import Text
from pdrelay.gateway.wire import Wire, while_connected

log = logging.getLogger(__name__)


class Answer:
    """An ASGI response.

    The status line is sent with the first token, so that what fails before it gets a status of its own. However it
    ends, every token stream is closed (INV-ANSWER-1).
    """

    def __init__(
        self, request_id: str, wanted: Wanted, choices: Sequence[Choice], frames: Frames, text: Text, meter: Meter
    ) -> None:
        self._id, self._wanted, self._choices = request_id, wanted, choices
        self._frames, self._text, self._meter = frames, text, meter
        self._open = len(choices)
        self._offsets = [0] * len(choices)  # characters of the tokens told in log probabilities

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers. The body of the request must have been read."""
        wire = Wire(self._id, send)
        direct = direct_of(scope)
        self._take_shortcut(direct)
        try:
            await while_connected(self._run(wire), receive, direct)
        finally:
            await self._close(wire.status)

    def _take_shortcut(self, direct: Direct | None) -> None:
        """Tokens need not come through the iteration when chunks are text alone and no stop string can end them."""
        (choice, *others), wanted = self._choices, self._wanted
        output = choice.planned.output
        if direct is None or others or output.can_stop or not (wanted.stream and wanted.only_text):
            return
        choice.divert(Straight(output, self._frames, direct, self._meter))

    async def _run(self, wire: Wire) -> None:
        try:
            await (self._send_stream(wire) if self._wanted.stream else self._send_whole(wire))
        except Exception as error:  # the client must get an answer, whatever it was
            await wire.fault(error)

    async def _close(self, status: int) -> None:
        traces: list[Trace] = []
        try:
            for choice in self._choices:
                await choice.aclose()
            traces = await self._traces()
        except PdrelayError as error:
            log.warning("request %s: %s", self._id, error)
        finally:
            self._meter.end(status, traces)

    # ---- the two kinds ----

    async def _send_stream(self, wire: Wire) -> None:
        async for choice, piece in merged(self._choices):
            if piece.batch is not None:
                self._meter.batch(piece.batch, choice.index)
            opening = b"" if wire.started else self._opening()
            await wire.part(opening + self._chunk(choice, piece))
            if piece.ending is not None:
                self._open -= 1
                await wire.part(await self._closing(choice, piece), more=self._open > 0)

    def _opening(self) -> bytes:
        return self._frames.opening(self._choices[0].prompt if self._wanted.token_ids else UNSET)

    def _chunk(self, choice: Choice, piece: Piece) -> bytes:
        """One chunk. Tokens that complete no text are worth a chunk only if it says more than text."""
        wanted, index = self._wanted, choice.index
        first = piece.batch is not None and not piece.batch.index
        repeats = first and not wanted.chat and choice.planned.echo is not None
        if not repeats and (wanted.only_text or (piece.batch is None and not piece.text)):
            return self._frames.text(index, piece.text) if piece.text else b""
        mark: Pdrelay = UNSET
        if wanted.trace and piece.batch is not None:
            mark = TokenMark(piece.batch.tier.value, piece.batch.index)
        extras = Extras(
            self._logprobs(choice, piece.positions) if piece.positions else None,
            list(piece.ids) if wanted.token_ids else UNSET,
            choice.prompt if repeats or (first and wanted.token_ids) else UNSET,  # vLLM tells them with an echo, too
        )
        usage = choice.usage if wanted.continuous_usage else None
        return self._frames.chunk(index, piece.text, extras, mark, usage)

    async def _closing(self, choice: Choice, piece: Piece) -> bytes:
        """What is sent when a choice has ended; more when it was the last."""
        assert piece.ending is not None
        if self._open:
            return self._frames.finish(choice.index, piece.ending)
        pdrelay = await self._final_trace()
        if not self._wanted.usage:
            return self._frames.finish(choice.index, piece.ending, pdrelay) + DONE
        return self._frames.finish(choice.index, piece.ending) + self._frames.usage(self._usage(), pdrelay) + DONE

    async def _send_whole(self, wire: Wire) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async for choice, piece in merged(self._choices):
            if piece.batch is not None:
                self._meter.batch(piece.batch, choice.index)
            pieces[choice.index].append(piece)
        pdrelay = await self._final_trace()
        done = [self._done(choice, pieces[choice.index]) for choice in self._choices]
        await wire.whole(200, self._frames.body(done, self._usage(), pdrelay))

    def _done(self, choice: Choice, pieces: list[Piece]) -> Done:
        ending, wanted = pieces[-1].ending, self._wanted
        assert ending is not None
        positions = [position for piece in pieces for position in piece.positions]
        rows = choice.prompt_logprobs if wanted.prompt_logprobs else None
        extras = Extras(
            self._logprobs(choice, positions) if wanted.logprobs is not None else None,
            [token for piece in pieces for token in piece.ids] if wanted.token_ids else UNSET,
            choice.prompt if wanted.token_ids else UNSET,
            UNSET if rows is None else prompt_logprobs(self._text, rows),
        )
        return Done(choice.index, "".join(piece.text for piece in pieces), ending, extras)

    # ---- what they share ----

    def _logprobs(self, choice: Choice, positions: Sequence[Position]) -> ChoiceLogprobs:
        top = self._wanted.logprobs or 0
        if self._wanted.chat:
            return chat_logprobs(positions, top)
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += sum(len(position.text) for position in positions)
        return text_logprobs(positions, top, offset)

    async def _final_trace(self) -> Pdrelay:
        """The trace, if wanted. Closing first makes it complete."""
        if not self._wanted.trace:
            return UNSET
        for choice in self._choices:
            await choice.aclose(complete=True)
        traces = await self._traces()
        return traces[0] if len(traces) == 1 else Traces(traces)

    async def _traces(self) -> list[Trace]:
        return [await choice.stream.trace() for choice in self._choices if choice.stream is not None]

    def _usage(self) -> Usage:
        leaders = [choice.usage for choice in self._choices if choice.leader is None]
        return usage_of(
            sum(usage.prompt_tokens for usage in leaders),
            sum(choice.planned.output.tokens for choice in self._choices),
            sum(usage.prompt_tokens_details.cached_tokens for usage in leaders),
        )
