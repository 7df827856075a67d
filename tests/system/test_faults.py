"""Parts that die, hang and come back, a line that breaks, arenas that are too small: real processes, emulated engines.

Whatever happens, a client gets its whole stream, each index once and every token the right one, or one clear error.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
from deployment import Answer, Deployment, pdrelay, running, take, wait_until

from pdrelay.cluster import config
from pdrelay.engine.emulated.tokens import reference_tokens
from pdrelay.engine.messages import Sampling
from pdrelay.perf import profile

pytestmark = pytest.mark.timeout(120)

_salts = count()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with running(tmp_path_factory.mktemp("run"), "--emulated", "--wan-rate", "20mbit") as up:
        up.pid("p-0")  # known before the first fault
        yield up


def prompt(seed: object, length: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(1000, 4000) for _ in range(length)]


def right(deployment: Deployment, ids: list[int], tokens: int) -> list[int]:
    """What one engine alone would answer."""
    file = config.load(deployment.run_dir / "pdrelay.toml")
    vocabulary = profile.load(Path(file.instance[0].profile)).vocabulary
    return reference_tokens(ids, Sampling(max_tokens=tokens, ignore_eos=True), vocabulary, file.model.max_model_len)[0]


class Request(threading.Thread):
    """A streamed completion in a thread of its own."""

    def __init__(self, deployment: Deployment, ids: list[int], tokens: int, extension: dict | None = None) -> None:
        super().__init__(daemon=True)
        self.answer, self._deployment, self._ids, self._tokens = Answer(), deployment, ids, tokens
        self._options = {"extension": extension, "cache_salt": f"faults-{next(_salts)}"}
        self.start()

    def run(self) -> None:
        with self._deployment.stream(self._ids, self._tokens, **self._options) as chunks:
            for chunk in chunks:
                take(self.answer, chunk)

    def is_past(self, phase: str) -> bool:
        tiers = self.answer.tiers
        return {"arrival": True, "token 0": bool(tiers), "relay": "relay" in tiers, "main": "main" in tiers}[phase]

    def result(self, seconds: float = 30) -> Answer:
        """The whole answer, all of it right."""
        self.join(seconds)
        assert not self.is_alive(), f"the stream hangs after {len(self.answer.indices)} indices"
        if self.answer.error is None:
            assert self.answer.ids == right(self._deployment, self._ids, self._tokens)
            assert self.answer.indices == sorted(set(self.answer.indices))
        return self.answer


@contextmanager
def returns_to_its_start(deployment: Deployment):
    """Afterwards every role is served again and no depot holds anything for a request that has ended."""
    before = deployment.held()
    try:
        yield
    finally:
        deployment.revive_killed()
    wait_until(deployment.healthy, 20, "every role to be served")
    wait_until(lambda: deployment.held() == before, 25, "leases, reservations and transfers to end")
    wait_until(lambda: _ends_on_main_decode(deployment), 10, "main decode to take over again")


def _ends_on_main_decode(deployment: Deployment) -> bool:
    answer = Request(deployment, prompt("again", 200), 60).result()
    assert answer.error is None
    return answer.tiers[-1] == "main"  # on a busy machine a short answer may end before main decode is ready


def refused(deployment: Deployment, *fragments: str) -> bool:
    """Whether /health and the next request both say what is down."""
    if deployment.healthy():
        return False
    answer = deployment.complete([1000, 1001], 2)
    return answer.error is not None and all(fragment in answer.error["message"] for fragment in fragments)


def noticed(deployment: Deployment, part: str, named: str) -> bool:
    """Whether /health and the next request show that a part is down: a relay serves without main decode."""
    if part == "host-a":
        return refused(deployment, named)
    if deployment.healthy() or named not in deployment.http.get(f"{deployment.url}/health").text:
        return False
    answer = Request(deployment, prompt(next(_salts), 300), 20).result()
    assert answer.error is None
    return answer.tiers[-1] == "relay"


FAULTS = [
    # part, phase, pipeline, tier of the last token, what /health and errors name
    ("host-a", "token 0", "p_md", "main", "its depot host-a is down"),
    ("host-b", "token 0", "p_md", "relay", "its depot host-b is down"),
    ("rld-0", "relay", "p_rld_md", "main", None),
    ("md-0", "main", "p_rld_md", "relay", "md-0"),
    ("line", "token 0", "p_md", "relay", "md-0"),
]


@pytest.mark.parametrize(("part", "phase", "pipeline", "last", "named"), FAULTS)
def test_a_part_that_dies_costs_no_token(deployment: Deployment, part, phase, pipeline, last, named):
    with returns_to_its_start(deployment):
        request = Request(deployment, prompt(("die", part, phase), 1500), 110, {"pipeline": pipeline})
        wait_until(lambda: request.is_past(phase), 10, phase)
        deployment.kill(part)
        answer = request.result()
        assert answer.error is None
        assert answer.tiers[-1] == last
        if named:
            wait_until(lambda: noticed(deployment, part, named), 10, "the gateway to notice")
        deployment.revive(part)


@pytest.mark.parametrize(("part", "phase", "pipeline", "last", "named"), FAULTS[:2])
def test_a_part_that_hangs_costs_no_token(deployment: Deployment, part, phase, pipeline, last, named):
    with returns_to_its_start(deployment):
        request = Request(deployment, prompt(("hang", part), 1500), 60, {"pipeline": pipeline})
        wait_until(lambda: request.is_past(phase), 10, phase)
        with deployment.hung(part):
            answer = request.result()
            assert answer.error is None
            assert answer.tiers[-1] == last
            wait_until(lambda: noticed(deployment, part, named), 10, "the gateway to notice")


@pytest.mark.parametrize("part", ["p-0", "host-a"])
def test_without_token_0_there_is_one_clear_error(deployment: Deployment, part):
    with returns_to_its_start(deployment):
        request = Request(deployment, prompt(("early", part), 7000), 10)
        wait_until(lambda: any(value for key, value in deployment.held().items() if "reserved" in key), 5, "prefill")
        deployment.kill(part)
        answer = request.result(10)
        assert answer.error is not None
        assert "p-0" in answer.error["message"]
        assert answer.indices == []
        deployment.revive(part)


@pytest.mark.parametrize("pipeline", ["p_md", "p_rld_md"])
def test_after_a_cut_of_the_line_main_decode_takes_over_all_the_same(deployment: Deployment, pipeline):
    admin = f"http://{deployment.part('line')['address']}"
    with returns_to_its_start(deployment):
        request = Request(deployment, prompt(("cut", pipeline), 1500), 160, {"pipeline": pipeline})
        wait_until(lambda: request.is_past("token 0"), 10, "token 0")
        assert deployment.http.post(f"{admin}/cut").status_code == 200
        answer = request.result()
        assert answer.error is None
        assert (answer.tiers[1], answer.tiers[-1]) == ("relay", "main")
        wait_until(deployment.healthy, 10, "the line to be back")


def test_who_computes_a_prompt_may_leave_and_others_still_get_its_pages(deployment: Deployment):
    ids = prompt("shared", 6000)
    with returns_to_its_start(deployment), ThreadPoolExecutor(4) as pool:
        with pytest.raises(httpx.ReadTimeout), deployment.stream(ids, 50, cache_salt="shared", timeout_seconds=0.2):
            pass
        answers = list(pool.map(lambda _: deployment.complete(ids, 20, cache_salt="shared"), range(4)))
        assert [answer.ids for answer in answers] == [right(deployment, ids, 20)] * 4


def test_clients_and_faults_at_random(deployment: Deployment):
    """A few seconds of what may go on for hours: nothing wrong, nothing stuck, nothing that grows."""
    admin = f"http://{deployment.part('line')['address']}"
    rng, deadline = random.Random(11), time.monotonic() + 7
    with returns_to_its_start(deployment), ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(_client, deployment, seed, deadline) for seed in range(16)]
        before = _descriptors(deployment)
        while time.monotonic() < deadline - 3:
            _fault(deployment, admin, rng)
        deployment.http.post(f"{admin}/rate?value=20mbit")
        assert sum(client.result(40) for client in clients) > 16
    wait_until(lambda: all(n <= before[part] + 8 for part, n in _descriptors(deployment).items()), 10, "descriptors")


def _client(deployment: Deployment, seed: int, deadline: float) -> int:
    """Asks until `deadline`, sometimes leaving early; how many answers were whole."""
    rng, whole = random.Random(seed), 0
    while time.monotonic() < deadline:
        ids, tokens = prompt(rng.randrange(12), 40 * rng.randrange(1, 20)), rng.randrange(1, 40)
        forced = rng.choice([{}, {"pipeline": "p_md"}, {"pipeline": "p_rld_md", "handoff_at": rng.randrange(1, 50)}])
        leave, answer = rng.choice([None, None, 0, 2, 9]), Answer()
        with deployment.stream(ids, tokens, extension=forced, cache_salt=rng.choice("ab")) as chunks:
            for chunk in chunks:
                take(answer, chunk)
                if len(answer.indices) == leave:
                    break
        assert answer.indices == sorted(set(answer.indices))
        if answer.error is None and answer.finish_reason:
            whole += answer.ids == right(deployment, ids, tokens)
            assert answer.ids == right(deployment, ids, tokens)
    return whole


def _fault(deployment: Deployment, admin: str, rng: random.Random) -> None:
    part = rng.choice(["host-a", "host-b", "p-0", "rld-0", "md-0", "line"])
    faults: list[Callable[[], object]] = [
        lambda: deployment.http.post(f"{admin}/cut"),
        lambda: deployment.http.post(f"{admin}/rate?value={rng.choice(['2mbit', '200mbit'])}"),
        lambda: _pause(deployment, part, rng.uniform(0.1, 0.5)),
    ]
    rng.choice(faults)()
    time.sleep(0.5)  # between one fault and the next


def _pause(deployment: Deployment, part: str, seconds: float) -> None:
    with deployment.hung(part):
        time.sleep(seconds)  # how long it hangs


def _descriptors(deployment: Deployment) -> dict[str, int]:
    names = [part["name"] for part in deployment.parts()]
    return {name: len(list(Path(f"/proc/{deployment.pid(name)}/fd").iterdir())) for name in names}


@pytest.fixture
def cramped(deployment: Deployment):
    """The same deployment with arenas of 128 pages, that is of 2,048 tokens."""
    file = deployment.run_dir / "pdrelay.toml"
    small = deployment.run_dir.with_name("cramped.toml")
    small.write_text(file.read_text().replace("\nmetrics = ", '\narena = "2MiB"\nmetrics = '))
    deployment.end_revived()
    pdrelay("down", "--run-dir", str(deployment.run_dir))
    pdrelay("up", "--run-dir", str(deployment.run_dir), "--config", str(small))
    return deployment


def test_prompts_that_do_not_fit_into_the_arena_together_wait_for_each_other(cramped: Deployment):
    """Last in this file: the arenas stay small."""
    with returns_to_its_start(cramped):
        longest = Request(cramped, prompt("longest", 2048), 20).result()
        assert longest.error is None
        too_long = Request(cramped, prompt("too long", 2049), 20).result()
        assert "2048" in too_long.error["message"]
        pipelines = ["p_md", "p_rld_md"]
        cases = [(prompt(seed % 3, 1000 + 400 * (seed % 3)), {"pipeline": pipelines[seed % 2]}) for seed in range(12)]
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(cramped.complete, ids, 20, extension=forced) for ids, forced in cases]
            for (ids, _), answer in zip(cases, asked, strict=True):
                assert answer.result(60).ids == right(cramped, ids, 20)
