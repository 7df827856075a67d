"""Sessions that hold blocks leave room; an engine that does not get on loses its youngest session."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrelay.engine.vllm.admission import GROWN_SHARE, OPEN_SHARE, Admission, Budget, Hold
from pdrelay.engine.vllm.watchdog import Watchdog
from pdrelay.errors import EngineRejectedError

BUDGET = Budget(tokens=1024, block_tokens=32, sequences=8)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sessions_wait_for_room_in_their_order() -> None:
    admission = Admission(BUDGET)
    first = await admission.admit(300)
    second, third = (asyncio.create_task(admission.admit(tokens)) for tokens in (250, 10))
    await settle()
    assert (admission.waiting, second.done(), third.done()) == (2, False, False)
    first.release()
    await settle()
    assert (admission.waiting, second.done(), third.done()) == (0, True, True)
    assert admission.held == 256 + 32


async def test_no_more_than_half_of_the_sequences_are_held() -> None:
    admission = Admission(BUDGET)
    holds = [await admission.admit(1) for _ in range(4)]
    fifth = asyncio.create_task(admission.admit(1))
    await settle()
    assert not fifth.done()
    holds[2].release()
    await fifth


async def test_one_that_is_too_large_goes_alone() -> None:
    admission = Admission(BUDGET)
    large = await admission.admit(1000)
    other = asyncio.create_task(admission.admit(1))
    await settle()
    assert not other.done()
    large.grow(1023)
    large.release()
    large.release()
    await other


async def test_growth_ends_where_running_requests_need_room() -> None:
    admission = Admission(BUDGET)
    first, second = await admission.admit(200), await admission.admit(200)
    first.grow(500)
    with pytest.raises(EngineRejectedError, match="no room in the KV cache") as error:
        second.grow(300)
    assert error.value.status == 503
    second.release()
    first.grow(1000)


async def test_who_stops_waiting_holds_nothing() -> None:
    admission = Admission(BUDGET)
    first = await admission.admit(500)
    waiting = asyncio.create_task(admission.admit(100))
    await settle()
    first.release()  # admits it in the moment in which it is cancelled
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (admission.held, admission.waiting) == (0, 0)


class Sessions(RuleBasedStateMachine):
    """INV-ADMIT-1, and that whoever waits is admitted once the others have gone."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.admission = Admission(BUDGET)
        self.tasks: list[asyncio.Task[Hold]] = []

    def teardown(self) -> None:
        self.loop.run_until_complete(self._drain())
        self.loop.close()

    async def _drain(self) -> None:
        while self.tasks:
            await settle()
            done = [task for task in self.tasks if task.done()]
            assert done, "sessions wait although nobody holds anything"
            for task in done:
                task.result().release()
                self.tasks.remove(task)
        assert (self.admission.held, self.admission.waiting) == (0, 0)

    async def _act(self, action: object) -> None:
        action()  # type: ignore[operator]  # a callable
        await settle()

    @rule(tokens=st.integers(1, 1100))
    def open(self, tokens: int) -> None:
        def act() -> None:
            self.tasks.append(asyncio.create_task(self.admission.admit(tokens)))

        self.loop.run_until_complete(self._act(act))

    @rule(pick=st.integers(0, 99), tokens=st.integers(1, 300))
    def extend(self, pick: int, tokens: int) -> None:
        def act() -> None:
            held = [task.result() for task in self.tasks if task.done()]
            if held:
                hold = held[pick % len(held)]
                try:
                    hold.grow(hold.tokens + tokens)
                except EngineRejectedError:
                    hold.release()
                    self.tasks = [task for task in self.tasks if not (task.done() and task.result() is hold)]

        self.loop.run_until_complete(self._act(act))

    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        def act() -> None:
            if self.tasks:
                task = self.tasks.pop(pick % len(self.tasks))
                if task.done():
                    task.result().release()
                else:
                    task.cancel()

        self.loop.run_until_complete(self._act(act))

    @invariant()
    def leaves_room(self) -> None:
        holders = len(self.admission._held)
        assert holders <= max(1, BUDGET.sequences // 2)
        assert holders <= 1 or self.admission.held <= GROWN_SHARE * BUDGET.tokens
        assert OPEN_SHARE < GROWN_SHARE < 1


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# ---- watchdog ----


class Clock:
    """Time that the test lets pass; the watchdog looks at it every few milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def session(watchdog: Watchdog, ended: list[tuple[str, int]], name: str, outputs: asyncio.Queue[str]) -> None:
    try:
        with watchdog.waiting():
            await outputs.get()
            watchdog.progressed()
    except EngineRejectedError as error:
        ended.append((name, error.status))


async def looked(times: int = 3) -> None:
    await asyncio.sleep(0.005 * times)  # the watchdog's own period


async def test_the_youngest_goes_when_nothing_moves() -> None:
    clock, ended, outputs = Clock(), [], asyncio.Queue()
    watchdog = Watchdog(0.02, clock)
    tasks = [asyncio.create_task(session(watchdog, ended, name, outputs)) for name in "abc"]
    await settle()
    for expected in ([("c", 503)], [("c", 503), ("b", 503)]):
        clock.now += 1
        async with asyncio.timeout(5):
            while ended != expected:  # noqa: ASYNC110 - the sessions end by themselves
                await asyncio.sleep(0.001)
    clock.now += 1
    await looked()
    assert not tasks[0].done()  # the oldest is never ended
    outputs.put_nowait("output")
    await asyncio.gather(*tasks)


async def test_an_engine_that_gets_on_keeps_all_its_sessions() -> None:
    clock, ended, outputs = Clock(), [], asyncio.Queue()
    watchdog = Watchdog(0.02, clock)
    tasks = [asyncio.create_task(session(watchdog, ended, name, outputs)) for name in "ab"]
    await settle()
    for _ in range(20):
        clock.now += 0.019
        watchdog.progressed()
        await looked(1)
    assert not ended
    for _ in tasks:
        outputs.put_nowait("output")
    await asyncio.gather(*tasks)


async def test_a_cancelled_session_is_cancelled_all_the_same() -> None:
    watchdog, ended = Watchdog(5), []
    task = asyncio.create_task(session(watchdog, ended, "a", asyncio.Queue()))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended


@given(st.integers(1, 2000))
def test_whole_blocks_have_room_for_the_sample(tokens: int) -> None:
    whole = Admission(BUDGET)._whole(tokens)
    assert whole % BUDGET.block_tokens == 0
    assert 0 <= whole - tokens - 1 < BUDGET.block_tokens
