"""uvicorn's HTTP protocol, with a way to write the chunks of a running response without a coroutine for each.

ASGI has none, so it is an extension of the connection's scope: absent with any other server, and then every chunk goes
the usual way.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "pdrelay.direct"


class Direct:
    """Writes chunks of one response that has begun by ASGI's means, and ends by them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether a chunk may be written now: the response runs, in chunks, and the client reads."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.disconnected or cycle.response_complete:
            return False
        return not cycle.flow.write_paused and cycle.scope["method"] != "HEAD"

    def write(self, data: bytes) -> None:
        """Writes one chunk, not empty. Only while `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class DirectProtocol(HttpToolsProtocol):
    """Puts a `Direct` into the scope of each request."""

    def on_headers_complete(self) -> None:
        """Of the parser."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope.setdefault("extensions", {})[EXTENSION] = {"direct": Direct(self.cycle)}


def direct_of(scope: Scope) -> Direct | None:
    """That of a request; None where the server has none."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get("direct")
    return found if isinstance(found, Direct) else None
