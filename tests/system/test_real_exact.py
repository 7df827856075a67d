"""Real vLLM, real weights, float32, an unshaped line: every path gives what one stock vLLM instance gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from corpus import prompts
from deployment import free_port, running, wait_until
from openai import OpenAI
from tokenizers import Tokenizer

from pdrelay.cli.local.model import ensure_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OUTPUT = 48
PAGE = 32


@contextmanager
def stock_vllm(model: Path, log: Path):
    """One plain vLLM server, none of our code in it."""
    port = free_port()
    arguments = [
        *("--model", str(model), "--served-model-name", "stock", "--dtype", "float32", "--port", str(port)),
        *("--enforce-eager", "--block-size", "32", "--max-num-seqs", "16", "--max-model-len", "4096"),
    ]
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
    }
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env=env, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(server, url, log), 120, "stock vLLM to start")
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


def _answers(server: subprocess.Popen, url: str, log: Path) -> bool:
    assert server.poll() is None, log.read_text()[-3000:]
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_checkpoint()


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def cases(tokenizer) -> list[list[int]]:
    return prompts(tokenizer, 40, 5, 300) + prompts(tokenizer, 10, 350, 2000)


@pytest.fixture(scope="module")
def reference(model, cases, tmp_path_factory) -> list[list[int]]:
    """What one stock instance says, greedily."""

    def ask(url, prompt):
        body = {"model": "stock", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
        return response.json()["choices"][0]["token_ids"]

    with (
        stock_vllm(model, tmp_path_factory.mktemp("stock") / "log") as url,
        ThreadPoolExecutor(4) as pool,
    ):
        return list(pool.map(lambda prompt: ask(url, prompt), cases))


@pytest.fixture(scope="module")
def trio(reference, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    with running(run_dir, "--dtype", "float32", "--wan-rate", "unlimited", "--wan-rtt", "0ms") as up:
        yield up


def seam(index: int, prompt: list[int]) -> int:
    """Seams at many indices, some just on a page's edge, some just beside it."""
    edge = PAGE - len(prompt) % PAGE
    return [1, 2, edge, min(edge + 1, OUTPUT - 1), 5 + index % 37, OUTPUT - 1][index % 6]


def mode_of(index: int) -> str:
    return "catch_up" if index % 4 == 3 else "one_shot"


@pytest.mark.parametrize("pipeline", ["p_rld_md", "p_md"])
def test_greedy_output_equals_one_instance(trio, cases, reference, pipeline, tokenizer):
    def ask(index):
        forced = {"pipeline": pipeline}
        if pipeline == "p_rld_md":
            forced |= {"handoff_at": seam(index, cases[index]), "handoff_mode": mode_of(index)}
        return trio.complete(cases[index], OUTPUT, extension=forced, cache_salt=f"{pipeline}-{index}")

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(len(cases))))
    for index, answer in enumerate(answers):
        assert answer.error is None, f"case {index}: {answer.error}"
        assert answer.indices == sorted(set(answer.indices))
        assert answer.text == tokenizer.decode(answer.ids), "what the user saw is what the trace says"
        assert answer.ids == reference[index], f"case {index}, {len(cases[index])} tokens, trace {answer.trace}"
        if pipeline == "p_rld_md":
            assert answer.trace["handoff_index"] == seam(index, cases[index])
            assert answer.trace["handoff_mode"] == mode_of(index)
            assert answer.trace["main_tokens"] == OUTPUT - answer.trace["handoff_index"]


def test_eight_clients_and_nothing_is_left(trio, cases):
    """The short form; two minutes of it run in the timing suite."""
    before = trio.held()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: trio.complete(cases[i], 24), range(24)))
    assert all(answer.error is None and len(answer.ids) == 24 for answer in answers)
    wait_until(lambda: trio.held() == before, 15, "leases and transfers to end")


def test_the_official_client(trio):
    with OpenAI(base_url=f"{trio.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_curl(trio):
    body = json.dumps({"model": trio.model(), "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8})
    output = subprocess.run(
        ["curl", "-sS", f"{trio.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert '"finish_reason"' in output


@pytest.mark.parametrize(
    ("change", "status", "fragment"),
    [
        ({"model": "gpt-5"}, 404, "gpt-5"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context"),
        ({"best_of": 3}, 400, "best_of"),
        ({"temprature": 1}, 400, "temprature"),
    ],
)
def test_bad_input(trio, change, status, fragment):
    body = {"model": trio.model(), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | change
    response = httpx.post(f"{trio.url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == status
    assert fragment in response.json()["error"]["message"]
