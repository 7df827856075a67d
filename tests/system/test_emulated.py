"""A whole deployment on emulated engines: real processes, sockets, TLS, depots and line; modelled compute.

The emulated engine's next token depends on every token before it and on the KV bytes it loaded, so equal output through
different paths means that nothing was lost, doubled or mixed up.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployment import Answer, Deployment, pdrelay, running, take, wait_until

OPTIONS = ("--emulated", "--wan-rate", "200mbit", "--wan-rtt", "10ms")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with running(tmp_path_factory.mktemp("run"), *OPTIONS) as up:
        yield up


def relayed_to(index: int, mode: str) -> dict:
    return {"pipeline": "p_rld_md", "handoff_at": index, "handoff_mode": mode}


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(1000, 1200) for i in range(length)]


@pytest.mark.parametrize("mode", ["one_shot", "catch_up"])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 200, 1000])
def test_every_path_gives_the_same_tokens(deployment: Deployment, length, mode):
    ids, seams = prompt(length, length), (1, 2, 17, 39)
    forced = [*(relayed_to(k, mode) for k in seams), *[{"pipeline": "p_md"}] * len(seams)]

    def ask(number: int) -> Answer:
        return deployment.complete(ids, 40, extension=forced[number], cache_salt=f"{mode}-{length}-{number}")

    with ThreadPoolExecutor(len(forced)) as pool:
        answers = list(pool.map(ask, range(len(forced))))
    for answer, k in zip(answers, seams, strict=False):
        assert answer.error is None
        assert (answer.trace["handoff_index"], answer.trace["handoff_mode"]) == (k, mode)
        assert answer.indices == sorted(set(answer.indices))
        assert len(answer.ids) == 40
        assert answer.trace["relay_tokens"] == k - 1
    assert [answer.ids for answer in answers] == [answers[0].ids] * len(forced)


def test_a_cold_request_is_relayed_and_the_next_turn_is_not(deployment: Deployment):
    ids = prompt(7, 640)
    first = deployment.complete(ids, 32)
    assert first.trace["pipeline"] == "p_rld_md"
    assert first.trace["wan_bytes"] > 0
    second = wait_until(lambda: _if_hit(deployment, ids + first.ids + prompt(8, 10)), what="the index to hear of it")
    assert second.trace["hit_rate"] >= 0.95
    assert second.trace["wan_bytes_saved"] > second.trace["wan_bytes"]
    assert second.trace["prefill_hit_rate"] > 0.9


def _if_hit(deployment, ids):
    answer = deployment.complete(ids, 2)
    return answer if answer.trace["pipeline"] == "p_md" else None


def test_many_at_once_and_nothing_is_left(deployment: Deployment):
    before = deployment.held()

    def one(seed):
        return deployment.complete(prompt(seed, 50 + seed * 7), 30)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(100, 164)))
    assert all(answer.error is None and len(answer.ids) == 30 for answer in answers)
    _nothing_held(deployment, before)


@pytest.mark.parametrize("after", [0, 1, 5, 25])
def test_a_client_that_goes_away_frees_everything(deployment: Deployment, after):
    before = deployment.held()
    with deployment.stream(prompt(after + 300, 500), 2000) as chunks:
        for _ in range(after):
            next(chunks)
    _nothing_held(deployment, before)
    health = deployment.http.get(f"{deployment.url}/health")
    assert health.status_code == 200


def _nothing_held(deployment, before):
    wait_until(lambda: deployment.held() == before, 10, "leases, reservations and transfers to end")


def test_a_second_up_changes_nothing(deployment: Deployment):
    before = deployment.parts()
    place = ("--run-dir", str(deployment.run_dir), "--port", str(deployment.port), "--debug")
    again = pdrelay("up", *OPTIONS, *place)
    assert "already" in again.stdout + again.stderr
    assert deployment.parts() == before


def test_what_is_down_is_said_and_what_can_go_on_goes_on(tmp_path):
    with running(tmp_path / "run", "--emulated", "--wan-rate", "2mbit") as up:
        with up.stream(prompt(1, 800), 60) as chunks:
            stamped = [next(chunks) for _ in range(8)]
            up.kill("md-0")
            stamped += list(chunks)
        answer = _answer(stamped)
        assert answer.error is None
        assert len(answer.ids) == 60
        assert answer.indices == sorted(set(answer.indices))
        assert set(answer.tiers) == {"prefill", "relay"}
        wait_until(lambda: not up.healthy(), 10, "the gateway to notice")
        assert up.http.get(f"{up.url}/health").status_code == 200
        assert set(up.complete(prompt(2, 300), 20).tiers) == {"prefill", "relay"}
        up.kill("rld-0")
        refused = wait_until(lambda: _refusal(up), 10, "the gateway to notice")
        assert all(f"{part} (dc-" in refused["message"] for part in ("md-0", "rld-0"))
        assert "down" in refused["message"]
        assert up.http.get(f"{up.url}/health").status_code == 503
        assert up.part("md-0")["condition"] == "exited"


def _answer(stamped):
    answer = Answer()
    for chunk in stamped:
        take(answer, chunk)
    return answer


def _refusal(up):
    response = up.http.post(
        f"{up.url}/v1/completions", json={"model": up.model, "prompt": [1000, 1001], "max_tokens": 2}
    )
    return response.json()["error"] if response.status_code == 503 else None
