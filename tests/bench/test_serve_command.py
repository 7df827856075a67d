"""`pdrelay bench serve` as a user calls it."""

import asyncio
import json
import re
from pathlib import Path
from threading import Event, Thread

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from openai_server import serving, whole

from pdrelay.cli.main import main

seen: list[dict] = []


async def answer(request: web.Request) -> web.StreamResponse:
    """As vLLM with a vocabulary of 4000; refuses prompts of 66 tokens, as the model `plain` what only vLLM takes."""
    body = await request.json()
    seen.append(body)
    if body["model"] == "plain" and ("ignore_eos" in body or isinstance(body.get("prompt"), list)):
        return web.json_response({"error": {"message": "unknown parameter"}}, status=400)
    if body.get("ignore_eos") and isinstance(body.get("prompt"), list) and max(body["prompt"]) >= 4000:
        return web.json_response({"error": {"message": "token id out of vocabulary"}}, status=400)
    if len(body.get("prompt") or ()) == 66:
        return web.json_response({"error": {"message": "unlucky"}}, status=500)
    return await whole(request, 0.002)


@pytest.fixture(scope="module")
def url():
    """The scripted endpoint, in a thread of its own."""
    ready, found = Event(), []

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(answer) as address:
            found.extend([address, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    found[1].call_soon_threadsafe(found[2].set)
    thread.join(10)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", *arguments])


def trace(path: Path, lengths: list[int]) -> Path:
    rows = [
        {"timestamp": 50 * i, "input_length": length, "output_length": 4, "hash_ids": list(range(-(-length // 512)))}
        for i, length in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_trace_is_played_and_every_file_written(url, tmp_path):
    records, page = tmp_path / "r.jsonl", tmp_path / "r.html"
    seen.clear()
    played = trace(tmp_path / "t", [900, 1536, 600])
    result = call("--base-url", url, "--endpoint", "completions", "--trace", str(played),
                  "--length-factor", "0.125", "--goodput", "ttft:1000", "--records", str(records), "--html", str(page),
                  "--extra-body", '{"top_k": 1}', "--json", "--save-detailed")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    keys = {"completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "ttfts", "itls",
            "output_throughput", "request_goodput", "total_token_throughput", "duration", "input_lens", "output_lens",
            "max_concurrent_requests", "model_id", "num_prompts", "start_times", "errors"}  # fmt: skip
    keys |= {f"{figure}_{name}_ms" for name in ("ttft", "ttst", "tpot", "itl", "e2el", "lag", "largest_gap")
             for figure in ("mean", "median", "std", "p99")}  # fmt: skip
    assert keys <= set(found)
    assert found["completed"] == 3
    assert found["workload"]["length_factor"] == 0.125
    assert found["input_lens"] == [112, 192, 75]
    assert found["output_lens"] == [4, 4, 4]
    assert found["start_times"] == pytest.approx([0, 0.05, 0.1], abs=1e-6)
    prompts = [body["prompt"] for body in seen[-3:]]
    assert prompts[1][:64] == prompts[0][:64] == prompts[2][:64]
    assert prompts[0] == prompts[1][:112], "its second block is the beginning of the same one"
    assert all(max(prompt) < 4000 for prompt in prompts), "ids that the endpoint refused are not sent again"
    assert seen[-1]["top_k"] == 1
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["prompt_tokens"] for row in rows] == [112, 192, 75]
    assert all(row["e2el"] >= row["ttst"] >= row["ttft"] > row["lag"] >= 0 for row in rows)
    text = page.read_text()
    assert not re.search(r'(src|href)="', text)
    assert text.count("<svg") == 7


def test_a_failure_is_told_and_the_rest_kept(url, tmp_path):
    played = trace(tmp_path / "t", [600, 66, 600])
    result = call("--base-url", url, "--endpoint", "completions", "--trace", str(played), "--length-factor", "1")
    assert result.exit_code == 1
    assert "failed: requests: 1 of 3 failed: HTTP 500: unlucky (1)" in result.output
    assert "2 of 3 requests in" in result.output


def test_an_endpoint_that_knows_openais_parameters_only_gets_words(url, tmp_path):
    seen.clear()
    result = call("--base-url", url, "--endpoint", "completions", "--model", "plain", "--length-factor", "0.125",
                  "--trace", str(trace(tmp_path / "t", [900, 600])), "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["workload"]["prompts"] == "words"
    assert "does not take ignore_eos" in found["notes"][0]
    first, second = (body["prompt"].split() for body in seen[-2:])
    assert (len(first), len(second)) == (112, 75)
    assert first[:64] == second[:64]


def test_sessions_at_the_chat_endpoint_fit_into_the_models_context(url):
    seen.clear()
    result = call("--base-url", url, "--generator", "agent", "--rate", "50", "--requests", "3", "--speed", "1000",
                  "--set", "prompt=2000", "--set", "longest=4000", "--set", "output=20", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["workload"]["length_factor"] < 0.125
    assert found["workload"]["template_tokens"] == 7
    assert found["workload"]["sessions"] == 3
    assert found["completed"] == found["workload"]["requests"] > 3
    assert all(len(body["messages"][0]["content"].split()) < 512 for body in seen)


def test_what_is_wrong_is_said_in_one_line(url, tmp_path):
    assert "nothing serves there" in call("--base-url", "http://127.0.0.1:1", "--quick").output
    for arguments, said in (
        (("--goodput", "speed:1"), "--goodput: found 'speed:1'"),
        (("--extra-body", "[]"), "--extra-body"),
        (("--set", "prompt=many"), "prompt"),
        (("--trace", str(tmp_path / "none")), "cannot be read"),
    ):
        result = call("--base-url", url, "--quick", *arguments)
        assert result.exit_code == 2, result.output
        assert said in result.output
