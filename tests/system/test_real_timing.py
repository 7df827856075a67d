"""Real vLLM and weights, bfloat16, a line of 20 Mbit/s and 30 ms: the relay, the next turn, endurance, failure."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from corpus import prompts
from deployment import Answer, running, take, wait_until
from tokenizers import Tokenizer

from pdrelay.cli.local.model import ensure_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KV_BYTES_PER_TOKEN = 23_040
PAGE_BYTES = 32 * KV_BYTES_PER_TOKEN


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    with running(tmp_path_factory.mktemp("run"), "--wan-rate", "20mbit", "--wan-rtt", "30ms") as up:
        yield up


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ensure_checkpoint() / "tokenizer.json"))


@pytest.fixture(scope="module")
def long_prompt(tokenizer) -> list[int]:
    return prompts(tokenizer, 1, 1500, 1500)[0]


def test_the_relay_hides_the_line(trio, long_prompt, capsys):
    relayed = trio.complete(long_prompt, 64, cache_salt="relayed").trace
    direct = trio.complete(long_prompt, 8, extension={"pipeline": "p_md"}, cache_salt="direct").trace
    assert relayed["pipeline"] == "p_rld_md"
    with_relay = relayed["second_token"] - relayed["prefill_done"]
    without = direct["second_token"] - direct["prefill_done"]
    with capsys.disabled():
        print(
            f"\n1,500 cold tokens over 20 Mbit/s, 30 ms: second token {with_relay:.2f} s after prefill with the relay,"
            f" {without:.2f} s without, as cdc_pd does; ratio {without / with_relay:.1f}"
        )
    assert with_relay <= 1.5
    assert without >= 3 * with_relay
    assert direct["wan_bytes"] >= len(long_prompt) * KV_BYTES_PER_TOKEN


def test_the_next_turn_sends_only_what_is_new(trio, long_prompt, tokenizer, capsys):
    opening = long_prompt[:700]  # 6 s of the line: a fast relay would make the whole answer while 1,500 tokens cross it
    first = trio.complete(opening, 600, cache_salt="turns")
    assert first.trace["handoff_index"] is not None, "the answer is long enough for the handoff to happen"
    fresh = tokenizer.encode("And what does that mean for somebody who only wants to use it?").ids
    second_prompt = opening + first.ids + fresh
    second = trio.complete(second_prompt, 16, cache_salt="turns")
    with capsys.disabled():
        print(f"\nnext turn, {len(fresh)} new tokens: {second.trace['wan_bytes']} bytes sent, "
              f"{second.trace['wan_bytes_saved']} saved, hit rate {second.trace['hit_rate']:.3f}")  # fmt: skip
    assert second.trace["pipeline"] == "p_md"
    assert second.trace["wan_bytes"] <= len(fresh) * KV_BYTES_PER_TOKEN + 2 * PAGE_BYTES


@pytest.mark.full
def test_bfloat16_agreement_is_reported(trio, tokenizer, capsys):
    cases = prompts(tokenizer, 16, 20, 300)
    agree = total = 0
    for index, prompt in enumerate(cases):
        at = {"pipeline": "p_rld_md", "handoff_at": 1 + index * 2}
        relayed = trio.complete(prompt, 40, extension=at, cache_salt=f"bf16-{index}")
        direct = trio.complete(prompt, 40, extension={"pipeline": "p_md"}, cache_salt=f"bf16-d-{index}")
        assert relayed.indices == sorted(set(relayed.indices))
        assert len(relayed.ids) == len(direct.ids) == 40
        same = [a == b for a, b in zip(relayed.ids, direct.ids, strict=True)]
        agree, total = agree + sum(same), total + len(same)
    with capsys.disabled():
        print(f"\nbfloat16: {agree} of {total} tokens agree between P-RLD-MD and P-MD ({agree / total:.1%})")


@pytest.mark.full
def test_eight_clients_for_two_minutes(trio, tokenizer):
    before, parts = trio.held(), {p["name"]: p["pid"] for p in trio.parts()}
    cases, number = prompts(tokenizer, 24, 30, 250), count()
    deadline = time.monotonic() + 120

    def client(_):
        answers = []
        while time.monotonic() < deadline:
            answers.append(trio.complete(cases[next(number) % len(cases)], 24))
        return answers

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for batch in pool.map(client, range(8)) for answer in batch]
    assert all(answer.error is None and len(answer.ids) == 24 for answer in answers)
    assert {p["name"]: p["pid"] for p in trio.parts()} == parts
    assert all(p["condition"] == "ready" for p in trio.parts())
    wait_until(lambda: trio.held() == before, 60, "leases, also those of demoted transfers, to end")


def test_main_decode_killed_while_the_relay_decodes(trio, long_prompt, tokenizer):
    """Last in this file: main decode stays dead."""
    answer = Answer()
    with trio.stream(long_prompt, 120, cache_salt="kill") as chunks:
        for _ in range(10):
            take(answer, next(chunks))
        trio.kill("md-0")
        for chunk in chunks:
            take(answer, chunk)
    assert answer.error is None
    assert answer.indices == sorted(set(answer.indices))
    assert len(answer.ids) == 120
    assert answer.text == tokenizer.decode(answer.ids)
    assert answer.tiers[-1] == "relay"
    assert answer.finish_reason == "length"
    served = wait_until(lambda: _served_without_main(trio), 15, "the relay to serve alone")
    assert len(served.ids) == 8
    assert served.trace["pipeline"] == "p_rld_md"
    assert (served.trace["relay_tokens"], served.trace["main_tokens"]) == (7, 0)


def _served_without_main(trio):
    answer = trio.complete([5, 6, 7], 8)
    return answer if answer.error is None and "main" not in answer.tiers else None
