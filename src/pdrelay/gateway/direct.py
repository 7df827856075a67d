"""uvicorn's HTTP protocol, with a way to write the chunks of a running response without a coroutine for each.

ASGI has none, so it is an extension of the connection's scope: absent with any other server, and then every chunk goes
the usual way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "pdrelay.direct"

_LONG = 1024
_SIZES = [b"%x" % size for size in range(_LONG)]
"""Of chunks, as they begin: formatting one takes longer than the rest of writing it."""


class _Way:
    """What a request's scope holds."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # The cycle holds the scope, which must not hold it: neither would be freed before a garbage collection.
        self.cycle = weakref.ref(cycle)
        self.gone: Callable[[], object] | None = None  # called when the client leaves early


class Direct:
    """Writes chunks of one response that has begun by ASGI's means, and ends by them."""

    def __init__(self, cycle: RequestResponseCycle, way: _Way) -> None:
        assert cycle.scope["method"] != "HEAD", "a HEAD request has no body"
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write
        self._way = way

    def ready(self) -> bool:
        """Whether a chunk may be written now: the response runs, in chunks, and the client reads."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or self._flow.write_paused:
            return False
        return cycle.chunked_encoding is True

    def when_gone(self, call: Callable[[], object]) -> None:
        """Has `call` called when the client leaves before the response is complete, at once if it has."""
        self._way.gone = call
        if self._cycle.disconnected:
            call()
        else:
            self._flow.resume_reading()  # else nobody would notice: a long body has stopped it

    def stay(self) -> None:
        """Takes that back."""
        self._way.gone = None

    def between(self, before: bytes, behind: bytes) -> Callable[[bytes], None]:
        """Writes one chunk: what it is given, between two pieces that are always the same. Only while `ready`."""
        write, fixed, before, behind = self._write, len(before) + len(behind), b"\r\n" + before, behind + b"\r\n"
        sizes = _SIZES

        def chunk(middle: bytes) -> None:
            size = fixed + len(middle)
            write(b"".join((sizes[size] if size < _LONG else b"%x" % size, before, middle, behind)))

        return chunk


class DirectProtocol(HttpToolsProtocol):
    """Puts the way to each request's response into its scope."""

    def on_headers_complete(self) -> None:
        """Of the parser."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[EXTENSION] = _Way(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of the transport."""
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and cycle.disconnected and (way := _way_of(cycle.scope)) is not None and way.gone:
            way.gone()


def direct_of(scope: Scope) -> Direct | None:
    """That of a running request; None where the server has none."""
    way = _way_of(scope)
    cycle = way.cycle() if way is not None else None
    return Direct(cycle, way) if way is not None and cycle is not None else None


def _way_of(scope: Mapping[str, Any]) -> _Way | None:
    found: _Way | None = scope.get("extensions", {}).get(EXTENSION)
    return found
