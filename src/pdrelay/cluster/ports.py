"""Free ports, and who has one that is not."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from pdrelay.errors import ConfigError

_RANGE = range(20000, 30000)  # below the range that the kernel gives to outgoing connections
_HOST = "127.0.0.1"


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_addresses(count: int) -> list[str]:
    """Distinct local addresses at which nothing listens. Raises ConfigError when there are too few."""
    found: list[str] = []
    for port in random.sample(_RANGE, len(_RANGE)):
        if len(found) == count:
            return found
        if is_free(_HOST, port):
            found.append(f"{_HOST}:{port}")
    raise ConfigError(f"ports: found fewer than {count} free from {_RANGE.start} to {_RANGE.stop - 1}")


def require_free(host: str, port: int, hint: str) -> None:
    """Raises ConfigError naming who listens there, if that can be seen."""
    if not is_free(host, port):
        raise ConfigError(f"port {port} on {host} is taken{_owner(port)}; {hint}")


def _owner(port: int) -> str:
    inodes = _listening_inodes(port)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                pid = link.parts[2]
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f" by process {pid} ({command.strip()[:60]})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
