"""An emulated engine as a process of its own: sessions and the OpenAI face over mutual TLS, a real depot, SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from pdrelay.cluster.tls import client_context
from pdrelay.cluster.topology import Instance, Rank, Role
from pdrelay.depot.arena import Arena
from pdrelay.depot.hub import Hub
from pdrelay.depot.server import DepotServer
from pdrelay.engine.client import WebSocketEngine
from pdrelay.engine.emulated.process import _listen
from pdrelay.engine.emulated.tokens import reference_tokens
from pdrelay.engine.messages import Finished, Open, Prefilled, Sampling, Tokens
from pdrelay.perf.profile import load, shipped

PROFILE = load(shipped("tiny-emulated"))
PROMPT = list(range(2000, 2100))
SAMPLING = Sampling(max_tokens=12, seed=3)
EXPECTED = reference_tokens(PROMPT, SAMPLING, PROFILE.vocabulary, 1024)[0]


class RunningEngine(NamedTuple):
    """The process, and how to reach it."""

    process: subprocess.Popen[bytes]
    address: str
    context: ssl.SSLContext
    hub: Hub

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self.context, base_url=f"https://{self.address}", trust_env=False)


@pytest.fixture
async def engine(tmp_path: Path, tls: Path, eventually):
    arena = Arena(16 << 20)
    hub = Hub("depot", arena.view, b"k" * 32, time.monotonic)
    depot = DepotServer(hub, arena)
    await depot.start(tmp_path / "depot.sock")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "pdrelay.toml"
    config.write_text(deployment(address, tls))
    process = start(config)
    try:
        await eventually(lambda: accepts(address) or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        yield RunningEngine(process, address, client_context(tls, "gateway"), hub)
    finally:
        process.kill()
        process.wait()
        await depot.aclose()


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pdrelay.cli.main", "engine", "--emulated"]
    command += ["--config", str(config), "--name", "engine"]
    with config.with_name("stderr").open("w") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def deployment(address: str, tls: Path) -> str:
    return f"""
    fleet_key_file = "{tls}/fleet.key"
    model = {{ name = "m", path = ".", max_model_len = 1024 }}
    gateway = {{ cluster = "c" }}
    tls = {{ directory = "{tls}" }}
    cluster = [{{ name = "c" }}]
    host = [{{ name = "h", cluster = "c", socket = "depot.sock", listen = "127.0.0.1:1" }}]
    [[instance]]
    name = "engine"
    cluster = "c"
    roles = ["prefill", "decode"]
    ranks = [{{ host = "h" }}]
    listen = "{address}"
    """


async def test_sessions_and_clean_end(engine: RunningEngine, tmp_path: Path, eventually) -> None:
    client = WebSocketEngine("engine", engine.address, engine.context)
    await eventually(lambda: client.status.healthy)
    assert client.status.hello.contract.page_bytes == PROFILE.kv.page_bytes
    prefill = client.open(Open(sid="p", mode="prefill", prompt=PROMPT, sampling=SAMPLING))
    first, _ = [event async for event in prefill.events()]
    assert first == Tokens("p", 0, EXPECTED[:1], prefilled=Prefilled())
    await eventually(lambda: engine.hub.stats().pages == len(PROMPT) // 16)  # the tail went with its only owner
    decode = client.open(Open(sid="d", mode="decode", prompt=PROMPT, sampling=SAMPLING, eager=EXPECTED[:1]))
    decode.takeover(EXPECTED[1:4])
    events = [event async for event in decode.events()]
    assert [token for event in events if isinstance(event, Tokens) for token in event.ids] == EXPECTED[4:]
    assert isinstance(events[-1], Finished)
    await eventually(lambda: engine.hub.stats().leases == 0)
    engine.process.send_signal(signal.SIGTERM)
    await eventually(lambda: engine.process.poll() is not None)
    assert (engine.process.returncode, (tmp_path / "stderr").read_text()) == (0, "")
    await eventually(lambda: not client.status.healthy)
    await client.aclose()


async def test_openai_face(engine: RunningEngine) -> None:
    async with engine.client() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "seed": 3, "return_token_ids": True}
        whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["token_ids"] == EXPECTED
        assert whole["usage"] == {"prompt_tokens": 100, "completion_tokens": len(EXPECTED), "total_tokens": 112}
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        chunks = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
        assert chunks.pop() == "[DONE]"
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert [token for choice in choices for token in choice["token_ids"]] == EXPECTED
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
        text = (await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})).json()
        assert text["usage"]["prompt_tokens"] == 5


async def test_openai_errors(engine: RunningEngine) -> None:
    bad = {
        400: [{"prompt": []}, {"prompt": [1] * 1024}, {}, {"prompt": [1], "n": 2}, {"prompt": [1], "max_tokens": 0}],
        404: [{"prompt": [1], "model": "other"}],
    }
    async with engine.client() as client:
        for status, bodies in bad.items():
            for body in bodies:
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == status
                assert answer.json()["error"]["message"]


async def test_a_client_without_certificate_is_not_served(engine: RunningEngine, tls: Path) -> None:
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://{engine.address}/health")


def test_no_token_waits_for_the_acknowledgement_of_the_one_before() -> None:
    instance = Instance(name="md-0", cluster="a", roles=[Role.DECODE], ranks=[Rank(host="h")], listen="127.0.0.1:0")
    with _listen(instance) as listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as taken:
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
