"""How the kernel treats a bulk connection: congestion control, pace, how much it keeps unsent."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

from pdrelay.errors import ConfigError

UNSENT_SECONDS = 0.005
MIN_UNSENT, MAX_UNSENT = 8 << 10, 1 << 20
"""Bytes that wait in the kernel beyond what is on the line: more would only queue behind what comes later."""

_OFFERED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SO_MAX_PACING_RATE = 47  # not in Python's socket module


def require_congestion(name: str, key: str) -> None:
    """Raises ConfigError naming `key`, and what the kernel offers, unless connections may use control `name`."""
    if not name:
        return
    with socket.socket() as sock:
        try:
            set_congestion(sock, name)
        except OSError:
            offered = ", ".join(_OFFERED.read_text().split()) if _OFFERED.exists() else "nothing that could be listed"
            raise ConfigError(
                f"{key}: found {name!r}, expected a congestion control of this kernel: {offered} (others may need "
                f"`modprobe tcp_{name}`, or to be in net.ipv4.tcp_allowed_congestion_control)"
            ) from None


def set_congestion(sock: socket.socket, name: str) -> None:
    """Chooses the congestion control; empty leaves the default. Raises OSError."""
    if name:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def set_pace(sock: socket.socket, rate: float) -> None:
    """Bytes per second at most. Linux takes 64 bits; older kernels 32, where more means no limit."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@L", int(rate)))


def set_unsent(sock: socket.socket, rate: float) -> None:
    """Keeps about `UNSENT_SECONDS` of `rate` bytes per second unsent in the kernel. A closed socket is no error."""
    size = int(min(max(rate * UNSENT_SECONDS, MIN_UNSENT), MAX_UNSENT))
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)
