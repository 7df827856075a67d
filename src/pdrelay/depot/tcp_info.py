"""What the kernel knows of a TCP connection (Linux `struct tcp_info`)."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("=8B24I4Q6I4Q2I2Q")
_ESTABLISHED = 1
_UNKNOWN = 0xFFFFFFFF


class TcpInfo(NamedTuple):
    """One connection at one moment. Counters are since it was made."""

    alive: bool  # neither side has ended it
    rtt: float  # seconds, smoothed
    min_rtt: float  # seconds; 0 when not known
    cwnd_bytes: int  # congestion window
    unsent: int  # bytes in the socket's buffer that were not sent yet
    unacked: int  # segments that the far kernel has not acknowledged
    sent_bytes: int  # retransmitted ones included
    retransmitted_bytes: int


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """None for a closed socket."""
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)
    except OSError:
        return None
    fields = _LAYOUT.unpack(data.ljust(_LAYOUT.size, b"\0"))  # older kernels know fewer
    state, words, segments, tail = fields[0], fields[8:32], fields[36:42], fields[46:50]
    mss, rtt, cwnd = words[2], words[15], words[18]
    unsent, min_rtt = segments[2], segments[3]
    return TcpInfo(
        alive=state == _ESTABLISHED,
        rtt=rtt / 1e6,
        min_rtt=0.0 if min_rtt == _UNKNOWN else min_rtt / 1e6,
        cwnd_bytes=cwnd * mss,
        unsent=unsent,
        unacked=words[4],
        sent_bytes=tail[2],
        retransmitted_bytes=tail[3],
    )
