"""A client that leaves frees engines and pages at once, in whatever phase its request is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import whole

from pdrelay.gateway.app import build_app
from pdrelay.gateway.text import Text
from pdrelay.policy.base import Pipeline

FREED_WITHIN = 2.0
PROMPT = [(7 * i) % 300 for i in range(90)]


class Gate:
    """A clock of an engine that can be stopped."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.0005)
        await self.opened.wait()


@dataclass
class Client:
    """One HTTP request on the application; `leave` closes its connection."""

    app: Any
    body: dict[str, Any]
    sent: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        self._left = asyncio.Event()
        self._parts = [{"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
            "http_version": "1.1", "scheme": "http", "client": ("c", 1), "server": ("s", 1), "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(self.app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return self._parts.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def tokens(self) -> list[int]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


@dataclass
class Scene:
    deployment: whole.Whole
    gates: dict[str, Gate]
    client: Client

    def stop(self, *instances: str) -> None:
        for name in instances:
            self.gates[name].opened.clear()

    def running(self, instance: str) -> bool:
        return bool(self.deployment.backends[instance].load().running)

    def waits_for_pages(self, host: str) -> bool:
        return bool(self.deployment.depots[host].hub.waiters)


def catching_up(scene: Scene) -> bool:
    return any(run._main is not None and run._main.busy for run in scene.deployment.coordinator._running.values())


def taken_over(scene: Scene) -> bool:
    return any(run._handed_off for run in scene.deployment.coordinator._running.values())


@dataclass
class Phase:
    """How a request gets into a phase, and how that shows."""

    reached: Callable[[Scene], bool]
    stopped: tuple[str, ...] = ()
    held_line: bool = False
    debug: dict[str, Any] = field(default_factory=dict)


RELAYED = {"pipeline": Pipeline.P_RLD_MD.value}
PHASES = {
    "waiting for prefill": Phase(lambda s: s.running("p-0"), stopped=("p-0",)),
    "transferring": Phase(
        lambda s: len(s.client.tokens) == 1 and not s.running("p-0"), held_line=True, debug={"pipeline": "p_md"}
    ),
    "relay loading": Phase(lambda s: s.running("rld-0"), stopped=("rld-0",), held_line=True, debug=RELAYED),
    "relay decoding": Phase(lambda s: len(s.client.tokens) > 8, held_line=True, debug=RELAYED),
    "catch-up": Phase(catching_up, debug=RELAYED | {"handoff_mode": "catch_up", "handoff_at": 3000}),
    "taking over": Phase(taken_over, debug=RELAYED | {"handoff_mode": "one_shot", "handoff_at": 5}),
    "after takeover": Phase(
        lambda s: len(s.client.tokens) > 40, debug=RELAYED | {"handoff_mode": "one_shot", "handoff_at": 5}
    ),
}


@pytest.mark.parametrize("name", PHASES)
async def test_a_client_that_leaves_frees_everything(text: Text, name: str) -> None:
    phase = PHASES[name]
    gates = {instance: Gate() for instance in whole.HOSTS}
    async with whole.running(clocks=gates, held_line=phase.held_line) as deployment:
        app = build_app(deployment.coordinator, text, "m", debug=True)
        body = {"prompt": PROMPT, "max_tokens": 3900, "stream": True, "return_token_ids": True, "ignore_eos": True}
        scene = Scene(deployment, gates, Client(app, body | {"pdrelay": phase.debug}))
        scene.stop(*phase.stopped)
        scene.client.start()
        await whole.eventually(lambda: phase.reached(scene))
        assert not deployment.idle()
        scene.client.leave()
        await whole.eventually(deployment.idle, FREED_WITHIN)
        await asyncio.wait_for(scene.client.task, 5)


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(text: Text) -> None:
    async with whole.running() as deployment:
        app = build_app(deployment.coordinator, text, "m")
        client = Client(app, {"prompt": "the quick brown fox " * 420, "max_tokens": 5})
        client.start()
        client.leave()
        await asyncio.wait_for(client.task, 5)
        await whole.eventually(deployment.idle, FREED_WITHIN)
        assert not client.tokens
