"""The line's address for people and tests: counters, and changes while it runs.

`GET /metrics`, `POST /rate?value=40mbit`, `POST /rtt?value=80ms`, `POST /cut`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from pdrelay.cluster.units import parse_rate, parse_time
from pdrelay.errors import StartError
from pdrelay.wan.line import Address, Line
from pdrelay.wan.shaper import Lane

UNLIMITED = ("0", "unlimited")


def parse_line_rate(text: str) -> float:
    """Bytes per second, math.inf for `0` and `unlimited`. Raises ValueError."""
    if text.strip().lower() in UNLIMITED:
        return math.inf
    return parse_rate(text) or math.inf


class Admin:
    """Serves one line's counters and controls over HTTP."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._server: asyncio.Server | None = None
        self.address: Address | None = None

    async def start(self, address: Address) -> None:
        """Listens. Raises StartError when the address is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, *address)
        except OSError as error:
            raise StartError(f"line: cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error
        self.address = self._server.sockets[0].getsockname()[:2]

    async def aclose(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                status, text = self._answer(method, target)
                writer.write(_response(status, text))
                await writer.drain()
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # not HTTP, or gone: nobody to tell
        finally:
            writer.close()

    def _answer(self, method: str, target: str) -> tuple[str, str]:
        url = urlsplit(target)
        value = parse_qs(url.query).get("value", [""])[0]
        try:
            match method, url.path:
                case "GET", "/metrics":
                    return "200 OK", "".join(f"{row}\n" for row in metrics(self._line))
                case "POST", "/rate":
                    self._line.set_rate(parse_line_rate(value))
                    return "200 OK", f"rate {value}\n"
                case "POST", "/rtt":
                    self._line.set_rtt(parse_time(value))
                    return "200 OK", f"rtt {value}\n"
                case "POST", "/cut":
                    return "200 OK", f"cut {self._line.cut()} connections\n"
        except ValueError as error:
            return "400 Bad Request", f"value: {error}\n"
        return "404 Not Found", f"{(__doc__ or '').splitlines()[2]}\n"


def metrics(line: Line) -> Iterator[str]:
    """Rows of Prometheus text."""
    yield "# TYPE pdrelay_line_bytes_total counter"
    for direction, shaper in (("forward", line.forward), ("reverse", line.reverse)):
        for lane in Lane:
            labels = f'{{class="{lane.value}",direction="{direction}"}}'
            yield f"pdrelay_line_bytes_total{labels} {shaper.sent[lane]}"
    yield "# TYPE pdrelay_line_connections_total counter"
    yield f"pdrelay_line_connections_total {line.connections}"
    yield "# TYPE pdrelay_line_open_sockets gauge"
    yield f"pdrelay_line_open_sockets {line.open_sockets}"
    yield "# TYPE pdrelay_line_rate_bytes_per_second gauge"
    yield f"pdrelay_line_rate_bytes_per_second {'+Inf' if math.isinf(line.rate) else line.rate}"
    yield "# TYPE pdrelay_line_rtt_seconds gauge"
    yield f"pdrelay_line_rtt_seconds {line.rtt}"


def _response(status: str, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
