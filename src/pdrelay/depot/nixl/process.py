"""An agent in a process of its own, from its depot's side."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from pdrelay.depot import wire
from pdrelay.depot.link_messages import Endpoint
from pdrelay.depot.nixl import messages
from pdrelay.depot.nixl.base import AgentListener, Piece
from pdrelay.depot.sockets import read_frame
from pdrelay.errors import DepotError

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""For starting and for connecting: a large arena takes its time to be registered for RDMA."""

CLOSED = "the NIXL agent was closed"

_LANES = re.compile(r"(?:inter|intra)-node cfg#\d+ (.+)$")
_LANE = re.compile(r"[\w.]+/[\w.:-]+")
"""UCX tells at log level `info` what it chose to connect with: `... inter-node cfg#2 rma(rc_mlx5/mlx5_0:1) am(...)`."""


class Settings(NamedTuple):
    """How the agents of one link work."""

    backend: str
    params: Mapping[str, str]  # of NIXL's backend
    env: Mapping[str, str]  # of the process: UCX is configured by its environment


class AgentProcess:
    """An `Agent`. The process is started by `start`."""

    def __init__(self, depot: str, settings: Settings, arena_fd: int, listener: AgentListener) -> None:
        self._name = f"{depot}/{uuid4().hex}"
        self._settings, self._arena_fd, self._listener = settings, arena_fd, listener
        self._process: asyncio.subprocess.Process | None = None
        self._pidfd: int | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[messages.Ready | messages.Connected] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._said: deque[str] = deque(maxlen=4)  # last complaints of its libraries
        self._chosen = ""

    @property
    def path(self) -> str:
        """See Agent."""
        return f"nixl {self._settings.backend} {self._chosen}".rstrip()

    async def start(self) -> Endpoint:
        """See Agent."""
        if self._closed:
            raise DepotError(CLOSED)
        ours, theirs = socket.socketpair()
        with theirs:
            # -u for the libraries' sake: what UCX prints into a pipe would stay in C's buffer.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-u", "-m", "pdrelay.depot.nixl.agent", str(theirs.fileno()), str(self._arena_fd),
                pass_fds=[theirs.fileno(), self._arena_fd], env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        self._pidfd = os.pidfd_open(self._process.pid)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        if self._closed:
            self.close()
            raise DepotError(CLOSED)
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._read_output())]
        answer = await self._ask(messages.Start(self._name, self._settings.backend, dict(self._settings.params)))
        assert isinstance(answer, messages.Ready)
        return answer.endpoint

    async def connect(self, far: Endpoint) -> None:
        """See Agent."""
        await self._ask(messages.Connect(far))

    def write(self, batch: int, pieces: Sequence[Piece], note: bytes) -> None:
        """See Agent."""
        self._tell(messages.Write(batch, list(pieces), note))

    def notify(self, note: bytes) -> None:
        """See Agent."""
        self._tell(messages.Notify(note))

    def close(self) -> None:
        """See Agent."""
        self._closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(DepotError(CLOSED))
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                # Process.kill would reap a process that just ended, under the hands of the event loop.
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def aclose(self) -> None:
        """See Agent."""
        self.close()
        if self._process is not None:
            await self._process.wait()  # reaped: its connections, its queue pairs and its mappings are gone
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "UCX_LOG_LEVEL": "info", **self._settings.env}

    async def _ask(self, question: messages.Start | messages.Connect) -> messages.Ready | messages.Connected:
        self._answer = asyncio.get_running_loop().create_future()
        self._tell(question)
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._answer
        except TimeoutError:
            raise DepotError(f"the NIXL agent does not answer for {START_SECONDS:g} s") from None
        finally:
            self._answer = None

    def _tell(self, message: messages.ToAgent) -> None:
        if self._writer is not None and not self._closed:
            self._writer.write(wire.frame(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        detail = ""
        with suppress(OSError, asyncio.IncompleteReadError):
            while not detail:
                detail = self._on_message(messages.decode_from_agent(await read_frame(reader)))
        assert self._process is not None
        code = await self._process.wait()
        said = f" (it said: {'; '.join(self._said)})" if self._said else ""
        self._broke((detail or f"the process of the NIXL agent ended with {code}") + said)

    def _on_message(self, message: messages.FromAgent) -> str:
        """Acts on one message; what is wrong, if anything."""
        if self._closed:
            return ""
        match message:
            case messages.Ready() | messages.Connected():
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)
            case messages.Written(batch=batch):
                self._listener.written(batch)
            case messages.Notified(note=note):
                self._listener.notified(note)
            case messages.Broken(detail=detail):
                return detail
        return ""

    def _broke(self, detail: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(DepotError(detail))
        else:
            self._listener.broken(detail)

    async def _read_output(self) -> None:
        """Passes on what the libraries print, and finds in it what UCX connected with."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode(errors="replace").rstrip():
            logger.debug("NIXL agent %s: %s", self._name, line)
            if " INFO " not in line:
                self._said.append(line)
            if (chosen := _LANES.search(line)) is not None:
                self._chosen = " ".join(sorted(set(_LANE.findall(chosen[1]))))
