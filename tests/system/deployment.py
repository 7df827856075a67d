"""A whole deployment started the way a user starts it, and a client that reads every field of its answers."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx


@dataclass
class Answer:
    """One answer: text, trace, and when each index arrived (seconds since the request was sent)."""

    text: str = ""
    trace: dict = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict | None = None

    @property
    def ids(self) -> list[int]:
        return self.trace["token_ids"]


class Deployment:
    """A running deployment."""

    def __init__(self, run_dir: Path, port: int) -> None:
        self.run_dir, self.port, self.url = run_dir, port, f"http://127.0.0.1:{port}"
        self.http = plain_client(timeout=30)
        self._revived: dict[str, subprocess.Popen] = {}
        self._killed: set[str] = set()

    def status(self) -> dict:
        return json.loads(pdrelay("status", "--run-dir", str(self.run_dir), "--json", check=False).stdout)

    def parts(self) -> list[dict]:
        return self.status()["state"]["parts"]

    def part(self, name: str) -> dict:
        return next(part for part in self.parts() if part["name"] == name)

    def pid(self, name: str) -> int:
        """The part's process, which leads its group."""
        return self._revived[name].pid if name in self._revived else self._started[name]

    @functools.cached_property
    def _started(self) -> dict[str, int]:
        """What `up` started: asking again would take longer than a fault may wait."""
        return {part["name"]: part["pid"] for part in self.parts()}

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to every process of a part."""
        os.killpg(self.pid(name), number)

    def kill(self, name: str) -> None:
        """SIGKILL to every process of a part."""
        self.signal(name, signal.SIGKILL)
        self._killed.add(name)

    @contextmanager
    def hung(self, name: str) -> Iterator[None]:
        """The part does nothing meanwhile, and keeps its connections."""
        self.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(name, signal.SIGCONT)

    def revive(self, name: str) -> None:
        """Starts a killed part again, as a service manager would."""
        plan = json.loads((self.run_dir / "plan.json").read_text())
        arguments = next(part["arguments"] for part in plan["parts"] if part["name"] == name)
        if name in self._revived:
            self._revived[name].wait(5)
        with (self.run_dir / "logs" / f"{name}.log").open("ab") as log:
            self._revived[name] = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        self._killed.discard(name)

    def revive_killed(self) -> None:
        """After a test that failed before it could: the next one finds every part."""
        for name in sorted(self._killed):
            self.revive(name)

    def end_revived(self) -> None:
        """Stops what `revive` started."""
        for process in self._revived.values():
            process.kill()
            process.wait()
        self._revived.clear()

    def healthy(self) -> bool:
        """Whether every instance is healthy."""
        return all(row["healthy"] for row in self.http.get(f"{self.url}/health").json())

    def complete(self, prompt: str | list[int], max_tokens: int = 32, **options) -> Answer:
        """Streams one completion to its end."""
        with self.stream(prompt, max_tokens, **options) as chunks:
            answer = Answer()
            for chunk in chunks:
                take(answer, chunk)
            return answer

    @contextmanager
    def stream(
        self, prompt, max_tokens=32, *, extension=None, timeout_seconds=180, **options
    ) -> Iterator[Iterator[tuple[float, dict]]]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "pdrelay": {"trace": True, **(extension or {})}} | options
        started = time.monotonic()
        with self.http.stream("POST", f"{self.url}/v1/completions", json=body, timeout=timeout_seconds) as response:
            if response.status_code != 200:
                response.read()
                yield iter([(0.0, response.json())])
                return
            yield ((time.monotonic() - started, chunk) for chunk in events(response))

    @functools.cached_property
    def model(self) -> str:
        return self.http.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def held(self) -> dict[str, float]:
        """What depots hold for requests; must return to its start when they have ended."""
        held = {}
        for address in self._depot_metrics:
            rows = self.http.get(f"http://{address}/metrics").text.splitlines()
            held |= {sample: float(value) for sample, _, value in (row.rpartition(" ") for row in rows)
                     if sample.startswith(HELD)}  # fmt: skip
        assert len(held) == 2 * len(HELD), f"counters are missing: {sorted(held)}"
        return held

    @functools.cached_property
    def _depot_metrics(self) -> list[str]:
        return [part["metrics"] for part in self.parts() if part["kind"] == "depot"]


HELD = tuple(f"pdrelay_depot_{name}" for name in ("reserved_pages", "pinned_pages", "leases", "transfers"))


def take(answer: Answer, stamped: tuple[float, dict]) -> None:
    """Adds one chunk to an answer."""
    at, chunk = stamped
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    extension = chunk.get("pdrelay") or {}
    if "token_ids" in extension:
        answer.trace = extension
    if "index" in extension and "tier" in extension:
        answer.arrivals.append(at)
        answer.tiers.append(extension["tier"])
        answer.indices.append(extension["index"])
    for choice in chunk.get("choices", []):
        answer.text += choice.get("text") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def events(response: httpx.Response) -> Iterator[dict]:
    """The JSON of each server-sent event up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def pdrelay(*arguments: str, check: bool = True, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs one command of the CLI."""
    result = subprocess.run(
        [sys.executable, "-m", "pdrelay.cli.main", *arguments], capture_output=True, text=True, timeout=timeout
    )
    assert not check or result.returncode == 0, f"{arguments}: {result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result


@contextmanager
def running(run_dir: Path, *options: str) -> Iterator[Deployment]:
    """`pdrelay up`, then `pdrelay down`, after which nothing of it may be left."""
    port = free_port()
    with _up(run_dir, port, "--port", str(port), "--debug", *options) as deployment:
        yield deployment


@contextmanager
def running_file(run_dir: Path, file: Path, port: int) -> Iterator[Deployment]:
    """The same for a deployment file, whose gateway listens on `port`."""
    with _up(run_dir, port, "--config", str(file)) as deployment:
        yield deployment


@contextmanager
def _up(run_dir: Path, port: int, *options: str) -> Iterator[Deployment]:
    deployment = Deployment(run_dir, port)
    try:
        pdrelay("up", "--run-dir", str(run_dir), *options, timeout=400)
        yield deployment
    finally:
        deployment.http.close()
        deployment.end_revived()
        pdrelay("down", "--run-dir", str(run_dir))
    assert not leftovers(run_dir), "down left processes behind"


def plain_client(url: str = "", timeout: float = 300) -> httpx.Client:
    """A client of plain HTTP with a connection for each request, as different users have.

    `httpx.get` and its like load all certificate authorities each time, 30 ms of CPU, also where there is no TLS.
    """
    limits = httpx.Limits(max_keepalive_connections=0, max_connections=None)
    return httpx.Client(base_url=url, verify=False, trust_env=False, timeout=timeout, limits=limits)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leftovers(run_dir: Path) -> list[str]:
    """Processes that still belong to the deployment of `run_dir`."""
    found, marker = [], f"PDRELAY_RUN={run_dir}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def wait_until(condition, timeout: float = 10.0, what: str = "condition"):
    """Polls until `condition()` is true; returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.05)  # a poll against a deadline, not a guess at a duration
    return value
