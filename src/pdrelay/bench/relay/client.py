"""The clients of a gateway benchmark: raw connections that count the tokens of streamed completions."""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple, cast

import msgspec

from pdrelay.bench.relay.source import Source

SETTLING_SECONDS = 0.5

MARK = b'"text":"'
"""One for each token, and one more in the chunk that ends a stream."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients do: each has one request after the other on its connection."""

    host: str
    port: int
    streams: int
    tokens: int  # of one request
    model: str
    pause: float = 0.0  # longest pause of a client between requests, seconds


class Seen(NamedTuple):
    """What one window of time showed."""

    tokens: int
    requests: int
    ttfts: list[float]
    lags: list[float]  # from a token's making to its arrival


class Clients:
    """All clients of one measurement. `failure` is what went wrong first."""

    def __init__(self, plan: Plan, source: Source) -> None:
        self.plan, self.source = plan, source
        self.failure: str | None = None
        self.stopping = False
        self.tokens = self.requests = 0
        self.ttfts: list[float] = []
        self.lags: list[float] = []
        self.busy: set[_Client] = set()
        self.failed = asyncio.Event()
        self.under_way = asyncio.Event()  # every client has had a token
        self._had_one: set[_Client] = set()

    async def start(self) -> None:
        """Connects all and sends their first requests. Raises OSError."""
        loop, plan = asyncio.get_running_loop(), self.plan
        self._connections = [
            (await loop.create_connection(lambda: _Client(self), plan.host, plan.port))[1] for _ in range(plan.streams)
        ]
        for client in self._connections:
            client.later()

    def take(self) -> Seen:
        """What was seen since the last call."""
        seen = Seen(self.tokens, self.requests, self.ttfts, self.lags)
        self.tokens = self.requests = 0
        self.ttfts, self.lags = [], []
        return seen

    async def stop(self) -> None:
        """Breaks the running requests off, and gives the gateway a moment to notice."""
        self.stopping = True
        self.busy.clear()
        for client in self._connections:
            client.transport.abort()
        await asyncio.sleep(SETTLING_SECONDS)

    def first_token(self, client: _Client) -> None:
        """A client has its first token of a request."""
        self._had_one.add(client)
        if len(self._had_one) == self.plan.streams:
            self.under_way.set()

    def fail(self, reason: str) -> None:
        """Something went wrong; the first reason is kept."""
        self.failure = self.failure or reason
        self.failed.set()


class _Client(asyncio.Protocol):
    def __init__(self, clients: Clients) -> None:
        self._all = clients
        self._key = 0
        self._tail = b""
        self._read = 0
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._all.busy:
            self._all.fail(f"a connection was lost: {exc or 'closed by the gateway'}")

    def later(self) -> None:
        """The next request, after a pause."""
        if self._all.stopping:
            return
        pause = self._all.plan.pause
        asyncio.get_running_loop().call_later(random.uniform(0, pause), self._request)  # noqa: S311 - no secret

    def _request(self) -> None:
        everyone = self._all
        if everyone.stopping:
            return
        self._key, self._read, self._tail, self._done = everyone.source.next_key(), 0, b"", False
        everyone.busy.add(self)
        body = msgspec.json.encode({
            "model": everyone.plan.model, "prompt": "Count the words that follow.", "stream": True,
            "max_tokens": everyone.plan.tokens, "seed": self._key, "ignore_eos": True, "temperature": 0.0,
        })  # fmt: skip
        self._sent = time.perf_counter()
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        now, everyone = time.perf_counter(), self._all
        if everyone.stopping:
            return
        if not self._read and not self._tail and not data.startswith(b"HTTP/1.1 200"):
            everyone.fail(data[:300].decode(errors="replace"))
        joined = self._tail + data
        fresh = min(joined.count(MARK), everyone.plan.tokens - self._read)
        self._tail = joined[-(len(MARK) - 1) :]
        if fresh:
            self._tokens(fresh, now)
        if b"[DONE]" in joined:
            self._done = True
        if self._done and data.endswith(b"0\r\n\r\n"):
            everyone.busy.discard(self)
            everyone.requests += 1
            everyone.source.forget(self._key)
            if self._read != everyone.plan.tokens:
                everyone.fail(f"a stream ended with {self._read} of {everyone.plan.tokens} tokens")
            self.later()

    def _tokens(self, fresh: int, now: float) -> None:
        everyone = self._all
        if not self._read:
            everyone.ttfts.append(now - self._sent)
            everyone.first_token(self)
        elif (made := everyone.source.made.get(self._key)) is not None:
            everyone.lags.append(now - made)
        self._read += fresh
        everyone.tokens += fresh
        everyone.source.read(self._key, self._read)
