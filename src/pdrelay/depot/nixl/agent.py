"""The process of a NIXL agent, and the only code that imports NIXL: `python -m pdrelay.depot.nixl.agent SOCKET ARENA`.

Both arguments are descriptors. It holds no secret of the depot: over some transports a peer's writes can reach any of
a process' memory, not the arena alone. It ends when the depot does.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pdrelay.depot import wire
from pdrelay.depot.arena import map_arena
from pdrelay.depot.link_messages import Endpoint
from pdrelay.depot.nixl import messages

BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""Any will do: the arena is host memory. The package `nixl` chooses among them, but imports torch in some versions."""

PROGRESS_MICROSECONDS = 100_000
"""How long NIXL's progress thread sleeps when nothing arrives: it wakes with what does. At 0 it spins on a core."""

WARM_BYTES, WARM_NOTE = 4096, b"warm"
WARM_SECONDS = 30.0

BUSY_SECONDS, IDLE_SECONDS = 50e-6, 2e-3
"""Pauses between looks at NIXL's state, which no descriptor tells of: they double from one to the other."""

_PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 18


class NixlError(Exception):
    """The agent cannot work; says why and what to do about it."""


def bindings() -> Any:
    """NIXL's bindings, whichever build is installed. Raises NixlError."""
    for build in BUILDS:
        try:
            return importlib.import_module(f"{build}._bindings")
        except ModuleNotFoundError as error:
            if error.name != build:
                raise NixlError(f"the NIXL library cannot be imported: {error}") from error
        except ImportError as error:
            raise NixlError(f"the NIXL library cannot be imported: {error}") from error
    raise NixlError(f"the NIXL library is not installed (none of {', '.join(BUILDS)} is): pip install 'pdrelay[nixl]'")


class NixlAgent:
    """An agent that has the arena registered. Not thread-safe."""

    def __init__(self, start: messages.Start, arena: mmap.mmap) -> None:
        """Raises NixlError."""
        self._nixl = nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.useListenThread = False  # metadata travels on the control connection of the link, and nowhere else
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._agent = nixl.nixlAgent(start.name, config)
        self._backend = self._make_backend(start)
        self._warm = mmap.mmap(-1, WARM_BYTES)
        self._base, self._warm_base = address_of(arena), address_of(self._warm)
        self._register([(self._base, len(arena)), (self._warm_base, WARM_BYTES)])
        self._peer = ""
        self._posted: dict[int, int] = {}  # batch -> handle of its request

    def _make_backend(self, start: messages.Start) -> Any:
        known = list(self._agent.getAvailPlugins())
        if start.backend not in known:
            raise NixlError(f"NIXL has no backend {start.backend!r} here, it has {', '.join(sorted(known)) or 'none'}")
        try:
            return self._agent.createBackend(start.backend, start.params)
        except Exception as error:  # the binding's own classes
            raise NixlError(f"NIXL's backend {start.backend} does not start with {start.params}: {error}") from error

    def _register(self, regions: Sequence[tuple[int, int]]) -> None:
        nixl = self._nixl
        try:
            described = nixl.nixlRegDList(nixl.DRAM_SEG, [(at, size, 0, "") for at, size in regions])
            self._agent.registerMem(described, [self._backend])
        except Exception as error:
            locked = "raise the limit of locked memory (ulimit -l unlimited), which RDMA needs for the whole arena"
            raise NixlError(f"NIXL cannot register the arena of {regions[0][1]} bytes: {error}; {locked}") from error

    @property
    def endpoint(self) -> Endpoint:
        """Where a peer may write."""
        return Endpoint(self._agent.getLocalMD(), self._base, self._warm_base)

    def connect(self, far: Endpoint) -> None:
        """Loads the peer's metadata and writes to it once. Raises NixlError."""
        try:
            self._peer = self._agent.loadRemoteMD(far.metadata)
            handle = self._post([(self._warm_base, far.warm, WARM_BYTES)], WARM_NOTE)
            deadline = time.monotonic() + WARM_SECONDS
            while not self._done(handle):
                if time.monotonic() > deadline:
                    raise NixlError(f"nothing arrived there in {WARM_SECONDS:g} s: is its NIXL port reachable?")
                time.sleep(BUSY_SECONDS)
        except NixlError:
            raise
        except Exception as error:
            raise NixlError(f"the first write failed: {error}") from error
        self._agent.releaseXferReq(handle)
        self._there = far.base

    def write(self, message: messages.Write) -> None:
        """Posts the pieces of a batch. Raises NixlError."""
        pieces = [(self._base + here, self._there + there, size) for here, there, size in message.pieces]
        try:
            self._posted[message.batch] = self._post(pieces, message.note)
        except Exception as error:
            raise NixlError(f"a write could not be posted: {error}") from error

    def notify(self, note: bytes) -> None:
        """Sends a note. Raises NixlError."""
        try:
            self._agent.genNotif(self._peer, note, [self._backend])
        except Exception as error:
            raise NixlError(f"a note could not be sent: {error}") from error

    @property
    def writing(self) -> bool:
        """Whether writes are under way."""
        return bool(self._posted)

    def written(self) -> list[int]:
        """Batches that have arrived since the last call. Raises NixlError."""
        try:
            done = [batch for batch, handle in self._posted.items() if self._done(handle)]
            for batch in done:
                self._agent.releaseXferReq(self._posted.pop(batch))
        except Exception as error:
            raise NixlError(f"a write failed: {error}") from error
        return done

    def notes(self) -> list[bytes]:
        """Notes that have come since the last call, without that of a first write. Raises NixlError."""
        try:
            found = self._agent.getNotifs({}, [self._backend])
        except Exception as error:
            raise NixlError(f"notes cannot be had: {error}") from error
        return [note for notes in found.values() for note in notes if note != WARM_NOTE]

    def _post(self, pieces: Sequence[tuple[int, int, int]], note: bytes) -> int:
        nixl = self._nixl
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(at, size, 0) for at, _, size in pieces])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(at, size, 0) for _, at, size in pieces])
        handle: int = self._agent.createXferReq(nixl.NIXL_WRITE, here, there, self._peer, note, [self._backend])
        self._agent.postXferReq(handle, note)
        return handle

    def _done(self, handle: int) -> bool:
        state = self._agent.getXferStatus(handle)
        if state not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise NixlError(f"NIXL says {state}")
        return bool(state == self._nixl.NIXL_SUCCESS)


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping lies in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Server:
    """Carries out what the depot says, and tells it what happens."""

    def __init__(self, sock: socket.socket, arena: mmap.mmap) -> None:
        self._sock, self._arena = sock, arena
        self._unframer = wire.Unframer()
        self._agent: NixlAgent | None = None
        self._pause = BUSY_SECONDS
        self._listening = False  # for notes: nobody writes to an agent that connected to write itself

    def run(self) -> None:
        """Serves until the depot closes its end. Raises NixlError."""
        while (data := self._incoming()) is not None:
            for body in self._unframer.feed(data):
                self._on_message(messages.decode_to_agent(body))
            self._look()

    def _incoming(self) -> bytes | None:
        """What the depot says; waits for it no longer than until the next look at NIXL. None at the end."""
        must_look = self._agent is not None and (self._listening or self._agent.writing)
        if not select.select([self._sock], [], [], self._pause if must_look else None)[0]:
            return b""
        return self._sock.recv(READ_BYTES) or None

    def _on_message(self, message: messages.ToAgent) -> None:
        self._pause = BUSY_SECONDS
        if isinstance(message, messages.Start):
            self._agent = NixlAgent(message, self._arena)
            self._listening = True
            self._tell(messages.Ready(self._agent.endpoint))
            return
        if self._agent is None:
            raise NixlError(f"the first message is {type(message).__name__}")
        match message:
            case messages.Connect(far=far):
                self._agent.connect(far)
                self._listening = False
                self._tell(messages.Connected())
            case messages.Write():
                self._agent.write(message)
            case messages.Notify(note=note):
                self._agent.notify(note)

    def _look(self) -> None:
        if self._agent is None:
            return
        written = self._agent.written()
        notes = self._agent.notes() if self._listening else []
        for batch in written:
            self._tell(messages.Written(batch))
        for note in notes:
            self._tell(messages.Notified(note))
        self._pause = BUSY_SECONDS if written or notes else min(self._pause * 2, IDLE_SECONDS)

    def _tell(self, message: messages.FromAgent) -> None:
        self._sock.sendall(wire.frame(message))


def main() -> None:
    """Runs the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted depot ends it when it is through with it
    sock, arena = socket.socket(fileno=int(sys.argv[1])), map_arena(int(sys.argv[2]))
    with suppress(BrokenPipeError, ConnectionResetError):  # the depot ended
        try:
            Server(sock, arena).run()
        except NixlError as error:
            sock.sendall(wire.frame(messages.Broken(str(error))))
    os._exit(0)  # no destructor of NIXL may wait for a peer that does not answer


if __name__ == "__main__":
    main()
