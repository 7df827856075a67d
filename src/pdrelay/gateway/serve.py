"""How uvicorn serves the gateway."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from pdrelay.gateway.direct import DirectProtocol

KEEP_ALIVE = 75  # seconds; longer than the connection pools of common clients and proxies keep an idle connection


def server_config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """The server's settings; `port` 0 takes a free one.

    Both event loops of Python set TCP_NODELAY on the sockets that they accept, so a token is not held back until the
    client has acknowledged the one before (tests/gateway/test_gateway_server.py holds it).
    """
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=DirectProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # nothing here depends on who or where the client is
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=10,
    )
