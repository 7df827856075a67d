"""Asks parts whether they are ready, without heavy imports: the supervisor lives as long as the deployment."""

from __future__ import annotations

import asyncio

import msgspec

from pdrelay.cli.local.plan import GatewayLists, HttpAnswers, Readiness, SocketAnswers

_TIMEOUT = 2.0


async def is_ready(readiness: Readiness) -> bool:
    """One attempt."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            match readiness:
                case SocketAnswers(path=path):
                    _, writer = await asyncio.open_unix_connection(path)
                    writer.close()
                    return True
                case HttpAnswers(host=host, port=port, path=path):
                    await http_get(host, port, path)
                    return True
                case GatewayLists(host=host, port=port, instance=instance):
                    return healthy_in(await http_get(host, port, "/health"), instance)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return False


async def http_get(host: str, port: int, path: str) -> bytes:
    """The body of an answer of any status. Raises OSError, ValueError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # Version 1.0: the answer comes whole, not in chunks, and ends with the connection.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: */*\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator or not head.startswith(b"HTTP/"):
        raise ValueError(f"{host}:{port} does not speak HTTP")
    return body


class InstanceRow(msgspec.Struct):
    """One instance in the gateway's /health."""

    instance: str
    healthy: bool
    detail: str = ""
    alarm: str = ""


def read_health(body: bytes) -> list[InstanceRow]:
    """The rows of a /health body. Raises msgspec.DecodeError (a ValueError)."""
    return msgspec.json.decode(body, type=list[InstanceRow])


def healthy_in(body: bytes, instance: str) -> bool:
    """Whether a /health body lists `instance` as healthy. Raises msgspec.DecodeError (a ValueError)."""
    return any(row.instance == instance and row.healthy for row in read_health(body))
