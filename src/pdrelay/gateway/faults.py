"""From exceptions to OpenAI errors."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from pdrelay.errors import (
    DepotError,
    EngineRejectedError,
    EngineUnavailableError,
    PdrelayError,
    PlacementError,
    RequestError,
)
from pdrelay.gateway.responses import ErrorBody, ErrorDetail

log = logging.getLogger(__name__)

BAD_REQUEST = "invalid_request_error"
UNAVAILABLE = "service_unavailable"
SERVER_ERROR = "server_error"


class Fault(NamedTuple):
    """An HTTP status and the body that goes with it."""

    status: int
    detail: ErrorDetail

    @property
    def body(self) -> bytes:
        """The JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, self.status, media_type="application/json")


def fault_of(error: Exception) -> Fault:
    """What the client is told of `error`. Says nothing of errors that are not pdrelay's own, but logs them."""
    match error:
        case RequestError():
            return _fault(error.status, error, error.kind, error.param, error.code)
        case EngineRejectedError():
            return _fault(error.status, error, BAD_REQUEST if error.status < 500 else SERVER_ERROR)
        case PlacementError():
            return _fault(503, error, UNAVAILABLE, code="no_healthy_instance")
        case EngineUnavailableError():
            return _fault(502, error, UNAVAILABLE, code="engine_unavailable")
        case DepotError():
            return _fault(503, error, UNAVAILABLE, code="depot_unavailable")
        case PdrelayError():
            return _fault(500, error, SERVER_ERROR)
    log.error("request failed", exc_info=error)
    return Fault(500, ErrorDetail(message="Internal server error; the gateway's log says more.", type=SERVER_ERROR))


def _fault(status: int, error: Exception, kind: str, param: str | None = None, code: str | None = None) -> Fault:
    return Fault(status, ErrorDetail(message=str(error), type=kind, param=param, code=code))
