import asyncio
from itertools import pairwise

import pytest

from pdrelay.bench.answers import Answer, now
from pdrelay.bench.load_metrics import Goals, figures, timing
from pdrelay.bench.open_load import OpenLoad, Pace, Sent
from pdrelay.workload.base import Request


class Server:
    """Answers every request with two tokens, the first after `seconds`; fails the prompts that it is told to."""

    def __init__(self, seconds: float, failing: tuple[int, ...] = ()) -> None:
        self.seconds, self.failing = seconds, failing
        self.prepared: list[int] = []

    def prepare(self, number: int, request: Request):
        self.prepared.append(number)

        async def send(answer: Answer) -> None:
            answer.sent = now()
            try:
                await asyncio.sleep(self.seconds)
                answer.note(now(), 1)
                if request.prompt in self.failing:
                    answer.error = "it failed"
                    return
                answer.note(now() + 1e-6, 2)
                answer.output_tokens = 2
            except asyncio.CancelledError:
                answer.error = "interrupted"
                raise
            finally:
                answer.ended = now()

        return send


NO_HURRY = Pace()


def load_on(server: Server, pace: Pace = NO_HURRY) -> tuple[OpenLoad, list[Sent]]:
    ended: list[Sent] = []
    return OpenLoad(server.prepare, pace, ended.append), ended


async def test_requests_do_not_wait_for_those_before_them():
    load, ended = load_on(Server(0.2))
    await load.run([Request(0.01 * i, 10 + i, 2) for i in range(10)])
    assert load.most_running == 10
    assert [sent.number for sent in ended] == list(range(10))
    assert [sent.due - load.started for sent in ended] == pytest.approx([0.01 * i for i in range(10)])
    assert all(0 <= sent.lag < 0.1 for sent in ended)


async def test_waiting_for_a_turn_counts_as_latency():
    load, ended = load_on(Server(0.05), Pace(at_once=1))
    await load.run([Request(0.0, 10, 2)] * 4)
    times = [timing(sent, load.started) for sent in ended]
    assert load.most_running == 1
    assert all(each.ttft >= 0.05 * (place + 1) for place, each in enumerate(times))
    assert times[3].lag >= 0.15
    result = figures(times, 0.2, Goals({"ttft": 0.12}))
    assert result["request_goodput"] == pytest.approx(2 / 0.2)
    assert result["p99_lag_ms"] > 140


async def test_a_turn_follows_the_end_of_the_turn_before():
    last = Request(0.0, 30, 2, think=0.1)
    load, ended = load_on(Server(0.05), Pace(speed=2.0))
    await load.run([Request(0.0, 10, 2, then=Request(0.0, 20, 2, think=0.2, then=last)), Request(0.02, 11, 2)])
    turns = [sent for sent in ended if sent.request.prompt in (10, 20, 30)]
    assert [sent.turn for sent in turns] == [0, 1, 2]
    assert [after.due - before.answer.ended for before, after in pairwise(turns)] == pytest.approx([0.1, 0.05])
    assert sorted(sent.number for sent in ended) == [0, 1, 2, 3]


async def test_a_session_ends_with_the_turn_that_fails():
    load, ended = load_on(Server(0.0, failing=(20,)))
    await load.run([Request(0.0, 10, 2, then=Request(0.0, 20, 2, then=Request(0.0, 30, 2)))])
    assert [(sent.request.prompt, sent.answer.error) for sent in ended] == [(10, ""), (20, "it failed")]
    assert load.skipped == 1


async def test_an_interruption_keeps_what_was_measured():
    ended: list[Sent] = []
    two = asyncio.Event()

    def on_end(sent: Sent) -> None:
        ended.append(sent)
        if len(ended) == 2:
            two.set()

    load = OpenLoad(Server(0.05).prepare, Pace(at_once=2), on_end)
    task = asyncio.create_task(load.run([Request(0.0, 10, 2)] * 4 + [Request(1e6, 10, 2)]))
    await two.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    times = [timing(sent, load.started) for sent in ended]
    assert sum(not each.error for each in times) >= 2
    result = figures(times, 1.0, Goals())
    assert result["completed"] + result["failed"] == len(ended) == 4
