"""The yardstick: the same bytes over as many sockets, with nothing around them. Runs as two processes.

`python -m pdrelay.bench.bare_loop receive CONNECTIONS CHUNK MEMORY [TLS-DIRECTORY]` prints the port where it listens;
`... send CONNECTIONS CHUNK MEMORY ADDRESS [TLS-DIRECTORY]` connects and prints `ready`. MEMORY bytes of each side are
sent from and received into, over and over: as many as the payload for a transfer that puts every byte in its place, as
few as CHUNK for one that only passes through the cache. Then each takes lines with a number of bytes. For each, the
sender prints the time at which it began, the receiver that at which the last byte was there (CLOCK_MONOTONIC, which the
processes of one machine share).
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from pdrelay.bench.fleet import RECEIVER, SENDER
from pdrelay.cluster.tls import client_context, server_context
from pdrelay.cluster.units import parse_address


class Round:
    """Bytes that all connections of one side move together."""

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._left = total
        self.done = threading.Event()
        self.ended = 0.0
        if total <= 0:
            self.done.set()

    def take(self, most: int) -> tuple[int, int]:
        """Claims up to `most` bytes to send: how many are left before, and the claim; 0 when all are claimed."""
        with self._lock:
            left, size = self._left, min(most, self._left)
            self._left -= size
        return left, size

    def count(self, size: int) -> None:
        """Received `size` bytes."""
        with self._lock:
            self._left -= size
            if self._left <= 0:
                self.ended = time.monotonic()
                self.done.set()


def receive(connections: int, chunk: int, memory: int, tls: ssl.SSLContext | None) -> None:
    """The receiving process."""
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        socks = [server.accept()[0] for _ in range(connections)]
    box: list[Round] = [Round(0)]

    def drain(raw: socket.socket) -> None:
        sock = raw if tls is None else tls.wrap_socket(raw, server_side=True)
        room, at = _filled(max(memory // connections, chunk)), 0
        while size := sock.recv_into(room[at : at + chunk]):
            at = at + size if at + size + chunk <= len(room) else 0
            box[0].count(size)

    for sock in socks:
        threading.Thread(target=drain, args=(sock,), daemon=True).start()
    for total in _requests():
        box[0] = Round(total)
        print("armed", flush=True)
        box[0].done.wait()
        print(box[0].ended, flush=True)


def send(connections: int, chunk: int, memory: int, address: str, tls: ssl.SSLContext | None) -> None:
    """The sending process."""
    socks = [socket.create_connection(parse_address(address)) for _ in range(connections)]
    if tls is not None:
        socks = [tls.wrap_socket(sock, server_hostname=RECEIVER) for sock in socks]
    data = _filled(max(memory, chunk))
    places = len(data) // chunk
    print("ready", flush=True)

    def push(sock: socket.socket, work: Round) -> None:
        while True:
            left, size = work.take(chunk)
            if not size:
                return
            at = left // chunk % places * chunk
            sock.sendall(data[at : at + size])

    for total in _requests():
        work = Round(total)
        start = time.monotonic()
        threads = [threading.Thread(target=push, args=(sock, work), daemon=True) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(start, flush=True)


def _filled(size: int) -> memoryview:
    """Memory that has its pages, as an arena that has been used."""
    return memoryview(bytearray(b"\xa5") * size)


def _requests() -> Iterator[int]:
    lines: Iterable[str] = iter(sys.stdin.readline, "")
    yield from map(int, lines)


def main(arguments: list[str]) -> None:
    """See the module's text."""
    role, connections, chunk, memory, *rest = arguments
    sizes = int(connections), int(chunk), int(memory)
    if role == "receive":
        receive(*sizes, server_context(rest[0], RECEIVER) if rest else None)
    else:
        address, *tls = rest
        send(*sizes, address, client_context(tls[0], SENDER) if tls else None)


if __name__ == "__main__":
    main(sys.argv[1:])
