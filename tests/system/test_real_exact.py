"""Real vLLM, real weights, float32, an unshaped line: every path gives what one stock vLLM instance gives."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import pytest
import real
import seams
from corpus import prompts
from deployment import pdrelay, plain_client, wait_until
from openai import OpenAI
from semantics_rows import PLAIN
from tokenizers import Tokenizer

from pdrelay.cli.local.model import ensure_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OUTPUT = 48
PAGE = 32
SEAMS = 5
AT_ONCE = 4
TOOLS = "hermes"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return real.with_tools(ensure_checkpoint(), tmp_path_factory.mktemp("model") / "smol")


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def cases(tokenizer) -> list[list[int]]:
    return prompts(tokenizer, 20, 5, 300) + prompts(tokenizer, 5, 350, 2000)


@pytest.fixture(scope="module")
def trio(model, tmp_path_factory):
    with real.trio(tmp_path_factory.mktemp("run"), model, tools=TOOLS) as up:
        yield up


def seam(index: int, prompt: list[int]) -> int:
    """Seams at many indices, some just on a page's edge, some just beside it."""
    edge = PAGE - len(prompt) % PAGE
    return [1, 2, edge, min(edge + 1, OUTPUT - 1), 5 + index % 37, OUTPUT - 1][index % 6]


def mode_of(index: int) -> str:
    return "catch_up" if index % 4 == 3 else "one_shot"


@pytest.fixture(scope="module")
def stock(request, model, cases, tokenizer, tmp_path_factory):
    """What one stock instance says: greedily to the cases, and to every row of the semantics table."""
    with real.stock(model, tmp_path_factory.mktemp("stock") / "log", tools=TOOLS) as address:
        request.getfixturevalue("trio")  # starts meanwhile
        url = address()
        with plain_client(url) as client, ThreadPoolExecutor(AT_ONCE) as pool:
            reference = pool.map(partial(_ask_stock, client), cases)
            rows = seams.of_stock(url, tokenizer, SEAMS, PLAIN)
            return list(reference), rows


def _ask_stock(client: httpx.Client, prompt: list[int]) -> list[int]:
    body = {"model": real.STOCK_NAME, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body | {"return_token_ids": True})
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("pipeline", ["p_rld_md", "p_md"])
def test_greedy_output_equals_one_instance(stock, trio, cases, pipeline, tokenizer):
    def ask(index):
        forced = {"pipeline": pipeline}
        if pipeline == "p_rld_md":
            forced |= {"handoff_at": seam(index, cases[index]), "handoff_mode": mode_of(index)}
        return trio.complete(cases[index], OUTPUT, extension=forced, cache_salt=f"{pipeline}-{index}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(len(cases))))
    for index, answer in enumerate(answers):
        assert answer.error is None, f"case {index}: {answer.error}"
        assert answer.indices == sorted(set(answer.indices))
        assert answer.text == tokenizer.decode(answer.ids), "what the user saw is what the trace says"
        assert answer.ids == stock[0][index], f"case {index}, {len(cases[index])} tokens, trace {answer.trace}"
        if pipeline == "p_rld_md":
            assert answer.trace["handoff_index"] == seam(index, cases[index])
            assert answer.trace["handoff_mode"] == mode_of(index)
            assert answer.trace["main_tokens"] == OUTPUT - answer.trace["handoff_index"]


@pytest.fixture(scope="module")
def answers(stock, trio) -> dict[str, list[seams.Result]]:
    return seams.of_deployment(trio.url, stock[1], direct=False)


@pytest.mark.parametrize("name", PLAIN)
def test_a_parameter_means_the_same_across_the_seam(answers, stock, name):
    seams.check(name, stock[1][name], answers[name])


LEFT = 19
"""A case of 300 tokens: no step of an engine can be stopped half-way, so none may take long."""

PHASES = {
    # until which tier the client reads, and where the seam is
    "token 0": ("prefill", {"pipeline": "p_rld_md", "handoff_at": 900}),
    "relay": ("relay", {"pipeline": "p_rld_md", "handoff_at": 900, "handoff_mode": "one_shot"}),
    "catch-up": ("relay", {"pipeline": "p_rld_md", "handoff_at": 900, "handoff_mode": "catch_up"}),
    "main": ("main", {"pipeline": "p_rld_md", "handoff_at": 4}),
    "no relay": ("main", {"pipeline": "p_md"}),
}


_tries = count()


def _read_until(trio, prompt: list[int], tier: str, forced: dict) -> None:
    with trio.stream(prompt, 1000, extension=forced, cache_salt=f"leaves {next(_tries)}") as chunks:
        while next(chunks)[1].get("pdrelay", {}).get("tier") != tier:
            pass


@pytest.mark.parametrize("phase", ["prefill", *PHASES])
def test_a_client_that_leaves_frees_everything_in_two_seconds(trio, cases, phase):
    took = [_freed_after(trio, cases[LEFT], phase)]
    while len(took) < 4 and min(took) > 2:  # a busy machine may spoil some
        took.append(_freed_after(trio, cases[LEFT], phase))
    assert min(took) <= 2


def _freed_after(trio, prompt: list[int], phase: str) -> float:
    """Seconds from when a client leaves until nothing is held for it."""
    before = trio.held()
    if phase == "prefill":
        with pytest.raises(httpx.ReadTimeout):  # and closes the connection: there is no token yet
            trio.complete(prompt, timeout_seconds=0.1, cache_salt=f"leaves early {next(_tries)}")
    else:
        _read_until(trio, prompt, *PHASES[phase])
    left = time.monotonic()
    wait_until(lambda: trio.held() == before, 30, "depots to be free")
    wait_until(lambda: _engines_are_free(trio), 30, "engines to be free")
    return time.monotonic() - left


def _engines_are_free(trio) -> bool:
    trio.complete([5, 6, 7], 4, extension={"pipeline": "p_rld_md", "handoff_at": 2})  # vLLM counts when it steps
    return not any(real.running_requests(trio.run_dir, name) for name in ("p-0", "rld-0", "md-0"))


def test_eight_clients_and_nothing_is_left(trio, cases):
    """The short form; two minutes of it run in the timing suite."""
    before = trio.held()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: trio.complete(cases[i], 24), range(24)))
    assert all(answer.error is None and len(answer.ids) == 24 for answer in answers)
    wait_until(lambda: trio.held() == before, 15, "leases and transfers to end")


def test_certificates_rotate_under_a_running_trio(trio):
    """vLLM's servers show the new ones. Twice: who watches a file may lose sight of it by its first change."""
    directory = trio.run_dir.parent / "tls"
    addresses = {part["name"]: part["address"] for part in trio.parts() if part["kind"] == "engine"}
    pids = {name: trio.pid(name) for name in addresses}
    named = [option for part in trio.parts() if part["kind"] != "line" for option in ("--name", part["name"])]
    for _ in range(2):
        before = real.certificates(directory, addresses)
        pdrelay("certs", "--dir", str(directory), "--rotate", *named)
        wait_until(lambda before=before: _all_differ(before, real.certificates(directory, addresses)), 30, "rotation")
    trio.kill("gateway")  # a gateway that starts connects to every part, with the new certificates
    trio.revive("gateway")
    wait_until(lambda: _healthy(trio), 60, "the gateway to connect to every part")
    assert trio.complete([1, 2, 3], 8).ids
    assert {name: trio.pid(name) for name in addresses} == pids


def _healthy(trio) -> bool:
    try:
        return trio.healthy()
    except httpx.TransportError:  # it does not listen yet
        return False


def _all_differ(before: dict[str, str], after: dict[str, str]) -> bool:
    return all(after[name] != serial for name, serial in before.items())


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
    body = json.dumps({"model": trio.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8})
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
    body = {"model": trio.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | change
    response = trio.http.post(f"{trio.url}/v1/chat/completions", json=body)
    assert response.status_code == status
    assert fragment in response.json()["error"]["message"]
