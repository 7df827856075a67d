"""Real vLLM for comparisons: one stock server, and a deployment with the same model and options."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from deployment import Deployment, free_port, plain_client, running_file, wait_until

from pdrelay.cli.local.layout import Demo, Settings, choose_places, deployment_text
from pdrelay.cluster.config import GATEWAY
from pdrelay.cluster.tls import client_context
from pdrelay.cluster.units import parse_address

Json = dict[str, Any]
STOCK_NAME = "smol"

MARKERS = {7: "<think>", 8: "</think>", 9: "<tool_call>", 10: "</tool_call>"}
"""Tokens that SmolLM2 has and never uses, under the names that parsers look for."""

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] %}{{ message['content'] }}{% endif %}
{%- for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def with_tools(checkpoint: Path, directory: Path) -> Path:
    """A copy of SmolLM2, weights shared, whose tokenizer and template know of tools and reasoning."""
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        (directory / name).symlink_to(checkpoint / name)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] in MARKERS:
            tokenizer["model"]["vocab"].pop(token["content"], None)
            token |= {"content": MARKERS[token["id"]], "special": False}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@contextmanager
def stock(model: Path, log: Path, *, tools: str = "", reasoning: str = "") -> Iterator[Callable[[], str]]:
    """Starts one plain vLLM server, none of our code in it; what is yielded waits for it and gives its address."""
    port = free_port()
    arguments = [
        *("--model", str(model), "--served-model-name", STOCK_NAME, "--dtype", "float32", "--port", str(port)),
        *("--enforce-eager", "--block-size", "32", "--max-num-seqs", "16", "--max-model-len", "4096"),
        # By default the engine waits for its worker in another process, and spins on a core of its own meanwhile.
        *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
        *(("--enable-auto-tool-choice", "--tool-call-parser", tools) if tools else ()),
        *(("--reasoning-parser", reasoning) if reasoning else ()),
        "--enable-prompt-tokens-details",
    ]
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other on a busy machine take forever
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
    }
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=env, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> str:
        with plain_client(url) as client:
            wait_until(lambda: _answers(server, client, log), 240, "stock vLLM to start")
        return url

    try:
        yield ready
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def _answers(server: subprocess.Popen, client: httpx.Client, log: Path) -> bool:
    assert server.poll() is None, log.read_text()[-3000:]
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def trio(run_dir: Path, model: Path, *, tools: str = "", reasoning: str = "") -> Iterator[Deployment]:
    """Prefill, relay and main decode in float32 on an unshaped line."""
    run_dir.mkdir(exist_ok=True)
    settings = Settings(debug=True, wan_rate="unlimited", wan_rtt="0ms", port=free_port(), dtype="float32")
    # Unix sockets need a short path.
    sockets = Path(tempfile.mkdtemp(prefix="pdrelay-"))
    places = choose_places(sockets, run_dir / "tls")
    text = deployment_text(settings, Demo(STOCK_NAME, model), places)
    parsers = f'[model]\ntool_parser = "{tools}"\nreasoning_parser = "{reasoning}"\n'
    file = run_dir / "real.toml"
    file.write_text(text.replace("[model]\n", parsers))
    try:
        with running_file(run_dir / "run", file, settings.port) as up:
            yield up
    finally:
        shutil.rmtree(sockets)


def running_requests(run_dir: Path, name: str) -> int:
    """Requests that a vLLM engine of the deployment runs or keeps waiting, by its own metrics."""
    parts = json.loads((run_dir / "plan.json").read_text())["parts"]
    address = next(part["address"] for part in parts if part["name"] == name)
    tls = client_context(str(run_dir.parent / "tls"), GATEWAY)
    with httpx.Client(verify=tls) as client:
        text = client.get(f"https://{address}/metrics", extensions={"sni_hostname": name}).text
    rows = [row for row in text.splitlines() if row.startswith(("vllm:num_requests_running", "vllm:num_requests_wait"))]
    assert rows
    return sum(int(float(row.rpartition(" ")[2])) for row in rows)


def certificates(directory: Path, addresses: dict[str, str]) -> dict[str, str]:
    """The serial number of the certificate that each engine shows to a new connection, by the engine's name."""
    return {name: _serial(directory, name, address) for name, address in addresses.items()}


def _serial(directory: Path, name: str, address: str) -> str:
    context = client_context(directory, GATEWAY)
    with (
        socket.create_connection(parse_address(address), 10) as sock,
        context.wrap_socket(sock, server_hostname=name) as encrypted,
    ):
        return str((encrypted.getpeercert() or {})["serialNumber"])
