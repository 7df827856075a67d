from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdrelay.depot.tcp_info import tcp_info
from pdrelay.depot.tcp_options import require_congestion, set_congestion, set_pace, set_unsent
from pdrelay.errors import ConfigError


def test_an_unknown_congestion_control_is_named_with_what_there_is() -> None:
    offered = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    with pytest.raises(ConfigError, match=r"link\[2\].congestion: found 'carrier-pigeon', expected") as caught:
        require_congestion("carrier-pigeon", "link[2].congestion")
    assert all(name in str(caught.value) for name in offered)
    require_congestion("", "link[2].congestion")
    require_congestion(offered[0], "link[2].congestion")


def test_the_kernel_takes_what_it_is_told() -> None:
    name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    with socket.socket() as sock:
        set_congestion(sock, name)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == name
        set_pace(sock, 12.5e9)
        assert int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 47, 8), "little") == int(12.5e9)
        set_unsent(sock, 1e6)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 8 << 10


def test_what_the_kernel_knows_of_a_connection_and_of_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    here.sendall(bytes(100_000))
    left = 100_000
    while left:
        left -= len(there.recv(left))
    info = tcp_info(here)
    assert info is not None
    assert info.alive
    assert info.sent_bytes > 0
    assert info.rtt > 0
    there.close()
    here.close()
    assert tcp_info(here) is None
