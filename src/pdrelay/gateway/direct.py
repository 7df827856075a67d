"""uvicorn's HTTP protocol, with a way to write the chunks of a running response without a coroutine for each.

ASGI has none, so it is an extension of the connection's scope: absent with any other server, and then every chunk goes
the usual way.
"""

from __future__ import annotations

import weakref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "pdrelay.direct"


class Direct:
    """Writes chunks of one response that has begun by ASGI's means, and ends by them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        assert cycle.scope["method"] != "HEAD", "a HEAD request has no body"
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    def ready(self) -> bool:
        """Whether a chunk may be written now: the response runs, in chunks, and the client reads."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or self._flow.write_paused:
            return False
        return cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        """Writes one chunk, not empty. Only while `ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


class DirectProtocol(HttpToolsProtocol):
    """Puts the way to each request's response into its scope."""

    def on_headers_complete(self) -> None:
        """Of the parser."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and self.scope["method"] != "HEAD":
            # The cycle holds the scope, which must not hold it: neither would be freed before a garbage collection.
            self.scope.setdefault("extensions", {})[EXTENSION] = {"cycle": weakref.ref(self.cycle)}


def direct_of(scope: Scope) -> Direct | None:
    """That of a running request; None where the server has none."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get("cycle")
    cycle = found() if found is not None else None
    return Direct(cycle) if cycle is not None else None
