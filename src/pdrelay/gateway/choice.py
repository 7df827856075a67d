"""The choices of one answer: token streams turned into text, several of one prompt sharing its prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from pdrelay.engine.logprobs import Logprobs
from pdrelay.errors import EngineError
from pdrelay.gateway.base import Finish, GenerationRequest, Sink, TokenBatch, TokenStream
from pdrelay.gateway.logprobs import Position, Speller
from pdrelay.gateway.output import Ending, Output
from pdrelay.gateway.responses import Usage, usage_of
from pdrelay.gateway.text import Text

Start = Callable[[GenerationRequest], TokenStream]


class Planned(NamedTuple):
    """A choice that is to be made."""

    generation: GenerationRequest
    output: Output
    echo: str | None = None  # comes before the output
    echo_only: bool = False  # the one token that has to be made is not shown


class Piece(NamedTuple):
    """What came of a choice: text and the tokens counted for it, in the end how it ended."""

    text: str = ""
    batch: TokenBatch | None = None  # what brought it; None for text that was held back
    ids: Sequence[int] = ()
    positions: Sequence[Position] = ()  # log probabilities of `ids`, of an echoed prompt before them
    ending: Ending | None = None


class Choice:
    """One choice. Iterate over `pieces` once, then always `aclose`."""

    def __init__(
        self, index: int, planned: Planned, start: Start, text: Text, *, logprobs: bool, leader: Choice | None = None
    ) -> None:
        """With a `leader`, a choice of the same prompt, it begins when that one's prompt is computed."""
        self.index, self.planned, self.leader = index, planned, leader
        self._start, self._text = start, text
        self._speller = Speller(text) if logprobs else None
        self._stream: TokenStream | None = None
        self.prefilled = asyncio.Event()  # the prompt is computed, or never will be

    def begin(self) -> None:
        """Starts the token stream. Raises PlacementError, RequestError."""
        if self._stream is None:
            self._stream = self._start(self.planned.generation)

    def divert(self, sink: Sink) -> None:
        """Lets tokens go to `sink` past `pieces`. The token stream must have begun."""
        assert self._stream is not None
        self._stream.divert(sink)

    @property
    def stream(self) -> TokenStream | None:
        """The token stream, once it has begun."""
        return self._stream

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.planned.generation.prompt

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Those of the prompt, if asked for and computed."""
        return self._stream.prompt_logprobs if self._stream is not None else None

    @property
    def usage(self) -> Usage:
        """What the choice has used so far."""
        cached = self._stream.cached_tokens if self._stream is not None else 0
        return usage_of(len(self.prompt), self.planned.output.tokens, cached)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All of the choice; the last piece has the ending."""
        try:
            if self.leader is not None:
                await self.leader.prefilled.wait()
            self.begin()
            stream, output = self._stream, self.planned.output
            assert stream is not None
            async for batch in stream:
                piece = self._piece(batch)
                if not self.prefilled.is_set():
                    self.prefilled.set()
                    piece = self._with_echo(piece)
                yield piece
                if output.stopped:
                    await stream.aclose(complete=True)
                    yield Piece(ending=output.ending(None))
                    return
            rest = output.finish(_natural(stream.finish))
            yield Piece("" if self.planned.echo_only else rest, ending=output.ending(stream.finish))
        finally:
            self.prefilled.set()

    async def aclose(self, *, complete: bool = False) -> None:
        """Ends the token stream; `complete` as there."""
        if self._stream is not None:
            await self._stream.aclose(complete=complete)

    def _piece(self, batch: TokenBatch) -> Piece:
        output = self.planned.output
        before = output.tokens
        text = output.push(batch.ids)
        ids = batch.ids[: output.tokens - before]  # none behind a stop string
        if self._speller is None:
            return Piece(text, batch, ids)
        if batch.logprobs is None:
            raise EngineError(f"{batch.tier.value} engine sent no log probabilities with index {batch.index}")
        return Piece(text, batch, ids, self._speller.positions(batch.logprobs[: len(ids)].rows()))

    def _with_echo(self, piece: Piece) -> Piece:
        if self.planned.echo is None:
            return piece
        positions = [*self._prompt_positions(), *([] if self.planned.echo_only else piece.positions)]
        return piece._replace(
            text=self.planned.echo if self.planned.echo_only else self.planned.echo + piece.text,
            positions=positions,
        )

    def _prompt_positions(self) -> list[Position]:
        if self._speller is None or self.prompt_logprobs is None:
            return []
        speller = Speller(self._text)
        return [speller.unknown(self.prompt[0]), *speller.positions(self.prompt_logprobs.rows())]


async def merged(choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Piece]]:
    """The pieces of all choices as they come. Raises what any of them raises."""
    if len(choices) == 1:
        (only,) = choices
        async with aclosing(only.pieces()) as pieces:
            async for piece in pieces:
                yield only, piece
        return
    inbox: asyncio.Queue[tuple[Choice, Piece | Exception]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(choice, inbox)) for choice in choices]
    try:
        running = len(choices)
        while running:
            choice, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            running -= item.ending is not None
            yield choice, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, inbox: asyncio.Queue[tuple[Choice, Piece | Exception]]) -> None:
    try:
        async with aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                inbox.put_nowait((choice, piece))
    except Exception as error:  # whoever reads the inbox raises it
        inbox.put_nowait((choice, error))


def _natural(finish: Finish | None) -> Finish:
    """A stream that ends without a stop string must say why."""
    assert finish is not None, "INV-ANSWER-2: a token stream ended without a finish"
    return finish
