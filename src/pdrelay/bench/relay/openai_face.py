"""The source as an engine behind the OpenAI API: as little HTTP as routers need, written for speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
import msgspec

from pdrelay.bench.relay.source import Running, Source

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1700000000,"model":"bench",'
    b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
)
WORDS = [f" word{number}".encode() for number in range(64)]


class Body(msgspec.Struct):
    """What is read of a request."""

    max_tokens: int = 16
    seed: int = 0


def face(source: Source, model: str) -> Callable[[], asyncio.Protocol]:
    """A factory of connections."""
    cards = msgspec.json.encode({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "bench"}]})
    frames = [http_chunk(_CHUNK % (word, b"null")) for word in WORDS]
    return lambda: _Connection(source, cards, frames)


def http_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Connection(asyncio.Protocol):
    def __init__(self, source: Source, cards: bytes, frames: list[bytes]) -> None:
        self._source, self._cards, self._frames = source, cards, frames
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._running: Running | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None:
            self._source.stop(self._running.key, self._running)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # ---- of the parser ----

    def on_message_begin(self) -> None:
        """A request starts."""
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        """Its target."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        """It is whole."""
        if self._url.endswith(b"completions"):
            self._stream(msgspec.json.decode(self._body, type=Body))
        else:
            answer = self._cards if self._url.endswith(b"/models") else b"{}"
            self._transport.write(_OK % (len(answer), answer))

    def _stream(self, request: Body) -> None:
        frames, transport, last = self._frames, self._transport, request.max_tokens - 1
        end = http_chunk(_CHUNK % (b"", b'"length"')) + http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

        def emit(index: int) -> None:
            frame = frames[index % len(frames)]
            transport.write(frame if index < last else frame + end)

        transport.write(_STREAM + frames[0])
        self._running = Running(request.seed, 1, request.max_tokens, emit, transport.abort)
        self._source.start(self._running)
