"""Every exception that pdrelay raises on purpose.

PdrelayError
  BenchError             a part of a benchmark failed; says which and why
  ConfigError            a file or option is wrong; names file, key, what was found and what is expected
  ContractError          two sides cannot exchange KV; names the differing field and both values
  DepotError
    ArenaFullError       the page does not fit now (or ever: see `capacity`)
    ProtocolError        the other side broke the wire protocol
    DepotUnavailableError  no connection to the depot
  EngineError
    EngineUnavailableError  no connection to the engine, or it died in the middle of a session
    EngineRejectedError  the engine refused the request; carries an HTTP-like status
  PlacementError         no healthy instance for a role, or no line to it; says what is down and why
  RequestError           the client's request is wrong; carries the OpenAI error fields
  StartError             a deployment could not start; says which part and why
"""

from __future__ import annotations


class PdrelayError(Exception):
    """Root of the tree."""


class BenchError(PdrelayError):
    """A part of a benchmark failed."""


class ConfigError(PdrelayError):
    """A file or option is wrong."""


class ContractError(PdrelayError):
    """Two sides hold KV that cannot be exchanged."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"KV contract differs in {field}: {ours!r} here, {theirs!r} there")
        self.field, self.ours, self.theirs = field, ours, theirs


class DepotError(PdrelayError):
    """The depot could not do what was asked."""


class ArenaFullError(DepotError):
    """`needed` bytes do not fit into the arena beside what is leased."""

    def __init__(self, needed: int, free: int, capacity: int) -> None:
        super().__init__(f"arena full: {needed} bytes needed, {free} can be freed of {capacity}")
        self.needed, self.free, self.capacity = needed, free, capacity

    @property
    def hopeless(self) -> bool:
        """True when waiting cannot help, because even an empty arena is too small."""
        return self.needed > self.capacity


class ProtocolError(DepotError):
    """The other side broke the wire protocol."""


class DepotUnavailableError(DepotError):
    """No connection to the depot."""


class EngineError(PdrelayError):
    """An engine could not do what was asked."""


class EngineUnavailableError(EngineError):
    """No connection to the engine, or it died in the middle of a session."""


class EngineRejectedError(EngineError):
    """The engine refused the request."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class PlacementError(PdrelayError):
    """No healthy instance for a role, or no line to it."""


class RequestError(PdrelayError):
    """The client's request is wrong. The fields are those of an OpenAI error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


class StartError(PdrelayError):
    """A deployment could not start."""
