"""The request's life, with every event in the test's hand."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import PAGES, Scene

from pdrelay.engine.messages import Failed
from pdrelay.errors import EngineRejectedError, EngineUnavailableError
from pdrelay.gateway import transfer
from pdrelay.gateway.legs import Notice
from pdrelay.policy.base import Pipeline
from pdrelay.policy.handoff import MAX_EXTEND


async def test_relay_and_main_decode_wait_for_the_prompts_pages_from_the_start():
    async with Scene() as scene:
        for engine in (scene.rld, scene.md):
            assert engine.last.request.await_names == list(PAGES.names)
        assert scene.depot.open == {"r-1"}
        await scene.prefill()


async def test_relay_streams_until_main_is_ready_then_main_gets_all_ids():
    async with Scene() as scene:
        await scene.prefill()
        assert scene.rld.last.takeovers == [[100]]
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101, 102)
        await scene.settle()
        assert scene.md.last.takeovers == []
        scene.md.last.opened()
        await scene.settle()
        assert scene.rld.last.aborted
        assert scene.md.last.takeovers == [[100, 101, 102]]
        scene.rld.last.tokens(3, 999)  # in flight at the cut
        scene.md.last.tokens(3, 103, last=True)
        scene.md.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100, 101, 102, 103]
        trace = await scene.run.trace()
        assert (trace.prefill_tokens, trace.relay_tokens, trace.main_tokens) == (1, 2, 1)
        assert (trace.handoff_index, trace.handoff_mode, trace.wan_bytes) == (3, "one_shot", 7)
        assert scene.run.cached_tokens == 16
        assert scene.depot.ended == ["r-1"]
        assert (
            trace.prefill_done <= trace.first_token <= trace.second_token <= trace.handoff_start <= trace.handoff_done
        )


class SlowReader(Scene):
    """Reads on only when `read` is set."""

    async def _consume(self):
        self.read = asyncio.Event()
        async for batch in self.run:
            self.seen += batch.ids
            await self.read.wait()


async def test_the_handoff_does_not_wait_for_who_reads():
    async with SlowReader() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101, 102)
        assert scene.seen == [100]
        scene.md.last.opened()
        assert scene.rld.last.aborted
        assert scene.md.last.takeovers == [[100, 101, 102]]
        scene.md.last.tokens(3, 103, last=True)
        scene.md.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100]
        scene.read.set()
        await scene.settle()
        assert scene.seen == [100, 101, 102, 103]


async def test_what_fails_a_request_does_not_fail_who_tells_it():
    async with Scene() as scene:
        scene.p.last.send(Failed(sid="", status=500, message="broken"))  # raises nothing
        scene.rld.last.opened()
        await scene.settle()
        assert isinstance(scene.error, EngineUnavailableError)


async def test_an_instance_is_left_as_soon_as_it_has_done_its_part():
    async with Scene() as scene:
        assert scene.occupancy.requests == {"p-0": 1, "rld-0": 1, "md-0": 1}
        assert scene.occupancy.backlog == {"p-0": 24}
        await scene.prefill()
        assert scene.occupancy.backlog == {"p-0": 0}
        assert scene.occupancy.requests == {"p-0": 0, "rld-0": 1, "md-0": 1}
        scene.rld.last.opened()
        scene.md.last.opened()
        await scene.settle()
        assert scene.occupancy.requests == {"p-0": 0, "rld-0": 0, "md-0": 1}


async def test_p_md_tells_main_the_ids_before_its_pages_are_there():
    async with Scene(Pipeline.P_MD) as scene:
        await scene.prefill()
        assert scene.md.last.takeovers == [[100]]
        scene.md.last.opened()
        scene.md.last.tokens(1, 101, last=True)
        scene.md.last.finished("length")
        await scene.settle()
        assert scene.seen == [100, 101]
        assert (await scene.run.trace()).handoff_index is None
        assert scene.rld.sessions == []


async def test_a_request_that_ends_on_the_relay_still_lands_its_pages():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101, last=True)
        scene.md.last.opened()  # in the same moment: the relay's last token must not be continued
        scene.rld.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100, 101]
        assert scene.md.last.takeovers == []
        assert scene.run.finish.reason == "stop"


async def test_pages_still_under_way_are_demoted_not_dropped():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.tokens(1, 101, last=True)
        scene.rld.last.finished("stop")
        await scene.settle()
        await scene.run.aclose()
        assert scene.depot.demoted == ["r-1"]
        assert (await scene.run.trace()).wan_bytes == 3


async def test_pages_are_demoted_also_when_the_caller_had_enough_at_a_stop_string():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.tokens(1, 101)
        await scene.settle()
        await scene.run.aclose(complete=True)
        assert scene.depot.demoted == ["r-1"]


async def test_pages_are_demoted_also_when_closing_is_cancelled():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.tokens(1, 101, last=True)
        scene.rld.last.finished("stop")
        await scene.settle()
        scene.depot.stats_come.clear()
        closing = asyncio.create_task(scene.run.aclose())
        await scene.settle()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        scene.depot.stats_come.set()
        await scene.settle()
        assert scene.depot.demoted == ["r-1"]


async def test_a_relay_that_went_down_since_placement_is_done_without():
    scene = Scene()
    scene.rld.down = True
    async with scene:
        await scene.prefill()
        scene.md.last.opened()
        await scene.settle()
        assert scene.error is None
        assert scene.md.last.takeovers == [[100]]


async def test_token_zero_can_end_the_request():
    async with Scene() as scene:
        scene.p.last.tokens(0, 2, last=True)
        scene.p.last.finished("stop")
        await scene.settle()
        assert scene.seen == [2]
        assert scene.rld.last.takeovers == scene.md.last.takeovers == []


@pytest.mark.parametrize("main_first", [True, False])
async def test_the_seam_can_be_forced(main_first):
    async with Scene(handoff_at=3) as scene:
        if main_first:
            scene.md.last.opened()
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101, 102, 103, 104)
        await scene.settle()
        assert scene.seen == [100, 101, 102]
        assert scene.rld.last.aborted
        if not main_first:
            assert scene.md.last.takeovers == []
            scene.md.last.opened()
            await scene.settle()
        assert scene.md.last.takeovers == [[100, 101, 102]]


async def test_catch_up_extends_while_the_relay_goes_on_then_switches():
    async with Scene(mode="catch_up") as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, *range(101, 110))
        await scene.settle()
        scene.md.last.opened()
        await scene.settle()
        assert scene.md.last.extends == [list(range(100, 110))]
        scene.rld.last.tokens(10, 110)
        await scene.settle()
        assert len(scene.md.last.extends) == 1  # at most one chunk is outstanding
        assert not scene.rld.last.aborted
        scene.md.last.extended()
        await scene.settle()
        assert scene.rld.last.aborted
        assert scene.md.last.takeovers == [[110]]
        scene.md.last.tokens(11, 111, last=True)
        scene.md.last.finished("stop")
        await scene.settle()
        assert scene.seen == list(range(100, 112))
        trace = await scene.run.trace()
        assert (trace.handoff_mode, trace.handoff_rounds, trace.handoff_index) == ("catch_up", 1, 11)


async def test_after_a_long_stay_main_decode_is_told_a_bounded_part_at_a_time():
    """Its other requests wait for each forward."""
    made = 2 * MAX_EXTEND + 50
    async with Scene(mode="catch_up") as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, *range(101, 100 + made))
        await scene.settle()
        scene.md.last.opened()
        await scene.settle()
        for _ in range(2):
            scene.md.last.extended()
            await scene.settle()
        extends = scene.md.last.extends
        assert [len(part) for part in extends] == [MAX_EXTEND, MAX_EXTEND, 50]
        assert [token for part in extends for token in part] == list(range(100, 100 + made))
        scene.rld.last.tokens(made, 100 + made, last=True)
        scene.rld.last.finished("length")
        await scene.settle()
        assert scene.seen == list(range(100, 101 + made))


async def test_main_lost_while_the_relay_decodes_goes_unnoticed():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.md.last.lose()
        scene.rld.last.tokens(1, 101)
        scene.rld.last.tokens(2, 102, last=True)
        scene.rld.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100, 101, 102]


async def test_a_relay_left_alone_finds_main_decode_again(monkeypatch):
    monkeypatch.setattr("pdrelay.gateway.request.MAIN_RETRY_SECONDS", 0.0)
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.md.down = True
        scene.md.last.lose()
        scene.rld.last.tokens(1, 101)
        await scene.settle()
        assert len(scene.md.sessions) == 1
        scene.md.down = False
        scene.rld.last.tokens(2, 102)
        await scene.settle()
        assert scene.md.last.request.await_names == list(PAGES.names)
        scene.md.last.opened()
        await scene.settle()
        assert scene.rld.last.aborted
        assert scene.md.last.takeovers == [[100, 101, 102]]


async def test_main_lost_after_the_handoff_is_rescued_from_the_ids():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.md.last.opened()
        await scene.settle()
        scene.md.last.tokens(1, 101)
        scene.md.last.lose()
        await scene.settle()
        assert scene.rld.last.takeovers == [[100, 101]]
        assert scene.rld.last.request.await_names == []
        scene.rld.last.tokens(2, 102, last=True)
        scene.rld.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100, 101, 102]


async def test_relay_lost_main_takes_over_when_its_pages_come():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101)
        scene.rld.last.lose()
        await scene.settle()
        assert scene.md.last.takeovers == []
        scene.md.last.opened()
        await scene.settle()
        assert scene.md.last.takeovers == [[100, 101]]


async def test_a_broken_line_gives_an_unrelayed_request_a_relay():
    async with Scene(Pipeline.P_MD) as scene:
        await scene.prefill()
        waiting = scene.md.last
        scene.run.notify(Notice.LINE_DOWN)
        await scene.settle()
        assert waiting.aborted  # it had been told to decode: two legs must never decode at once
        assert scene.rld.last.takeovers == [[100]]
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101)
        await scene.settle()
        scene.md.last.opened()  # the line came back
        await scene.settle()
        assert scene.md.last.takeovers == [[100, 101]]


async def test_lost_pages_are_made_again_and_the_second_token_zero_is_dropped():
    async with Scene() as scene:
        await scene.prefill()
        scene.run.notify(Notice.PAGES_LOST)
        await scene.settle()
        assert len(scene.p.sessions) == 2
        scene.p.last.tokens(0, 999, last=True)
        scene.p.last.finished("stop")
        await scene.settle()
        assert scene.seen == [100]
        assert scene.run.finish is None


async def test_a_depot_hears_when_no_more_pages_come_and_delivery_takes_long(monkeypatch):
    monkeypatch.setattr(transfer, "MISSING_SECONDS", 0.0)
    async with Scene() as scene:
        await scene.settle()
        assert not scene.depot.produced, "prefill runs"
        await scene.prefill()
        await scene.until(lambda: scene.depot.produced == ["r-1"])
        monkeypatch.setattr(transfer, "MISSING_SECONDS", 0.5)
        scene.run.notify(Notice.PAGES_LOST)
        await scene.settle()
        await scene.prefill()
        scene.run.notify(Notice.PAGES_LOST)  # before its time is over: it runs again
        await scene.settle()
        assert len(scene.p.live) == 1
        await asyncio.sleep(0.7)
        assert scene.depot.produced == ["r-1"]
        await scene.prefill()
        await scene.until(lambda: scene.depot.produced == ["r-1", "r-1"])


async def test_a_depot_that_has_delivered_in_time_hears_no_more(monkeypatch):
    monkeypatch.setattr(transfer, "MISSING_SECONDS", 0.5)
    async with Scene(Pipeline.P_MD) as scene:
        await scene.prefill()
        scene.md.last.opened()
        await scene.settle()
        assert scene.depot.ended == ["r-1"]
        await asyncio.sleep(0.7)
        assert not scene.depot.produced


async def test_pages_lost_while_prefill_runs_are_made_again_when_it_has_ended():
    async with Scene() as scene:
        scene.run.notify(Notice.PAGES_LOST)
        await scene.settle()
        assert len(scene.p.sessions) == 1
        await scene.prefill()
        assert len(scene.p.sessions) == 2
        await scene.prefill()
        assert len(scene.p.sessions) == 2


@pytest.mark.parametrize("relay_opened", [True, False])
async def test_pages_that_nobody_can_make_again_are_waited_for_by_nobody(relay_opened):
    async with Scene() as scene:
        await scene.prefill()
        if relay_opened:
            scene.rld.last.opened()
            await scene.settle()
        relay, main = scene.rld.last, scene.md.last
        scene.p.down = True
        scene.run.notify(Notice.PAGES_LOST)
        await scene.settle()
        assert main.aborted
        assert relay.aborted is not relay_opened
        assert scene.rld.last.request.await_names == (list(PAGES.names) if relay_opened else [])
        assert scene.rld.last.takeovers == [[100]]


async def test_without_a_relay_main_decode_computes_a_prompt_whose_pages_never_come():
    async with Scene(Pipeline.P_MD, spare_relay=False) as scene:
        await scene.prefill()
        scene.run.notify(Notice.DEPOT_DOWN)
        await scene.settle()
        first, second = scene.md.sessions
        assert first.aborted
        assert (second.request.await_names, second.takeovers) == ([], [[100]])


async def test_a_transfer_is_ended_also_when_its_depot_cannot_say_what_it_cost():
    async with Scene() as scene:
        await scene.prefill()
        scene.depot.lost_stats = True
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101, last=True)
        scene.rld.last.finished("stop")
        await scene.settle()
        await scene.run.trace()
        await scene.run.aclose()
        assert scene.depot.demoted == ["r-1"]


async def test_main_decode_without_its_depot_is_given_up_for_a_relay():
    async with Scene(Pipeline.P_MD) as scene:
        await scene.prefill()
        scene.run.notify(Notice.MAIN_DEPOT_DOWN)
        await scene.settle()
        assert scene.md.last.aborted
        assert scene.rld.last.takeovers == [[100]]


async def test_without_its_depot_prefill_is_given_up_at_once():
    async with Scene() as scene:
        scene.run.notify(Notice.DEPOT_DOWN)
        await scene.settle()
        assert "the depot beside p-0 is down" in str(scene.error)


async def test_a_relay_that_keeps_failing_is_not_asked_again_first():
    async with Scene(Pipeline.P_MD) as scene:
        await scene.prefill()
        scene.md.last.lose()
        await scene.settle()
        scene.rld.last.lose()
        await scene.settle()
        assert scene.md.last.request.await_names == []
        scene.md.last.opened()
        await scene.settle()
        assert scene.md.last.takeovers == [[100]]


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (Failed(sid="", status=400, message="bad"), EngineRejectedError, "bad"),
        (Failed(sid="", status=500, message="died"), EngineUnavailableError, "prefill failed: p-0: died"),
    ],
)
async def test_a_failed_prefill_is_an_error(event, error, message):
    async with Scene() as scene:
        scene.p.last.send(event)
        await scene.settle()
        assert isinstance(scene.error, error)
        assert str(scene.error) == message


async def test_without_any_decoder_left_the_error_says_which_is_down():
    async with Scene() as scene:
        await scene.prefill()
        scene.rld.down = scene.md.down = True
        scene.rld.last.lose()
        scene.md.last.lose()
        await scene.settle()
        assert isinstance(scene.error, EngineUnavailableError)
        assert "md-0 is down" in str(scene.error)
        assert "rld-0 is down" in str(scene.error)


STEPS = [
    "p0",
    "p1",
    "relay_open",
    "relay",
    "relay_end",
    "main_open",
    "main_extended",
    "main",
    "lose_relay",
    "lose_main",
    "lose_p",
    "line",
    "pages",
    "depot",
    "far_depot",
]


modes = st.sampled_from(["one_shot", "catch_up"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=14), st.sampled_from([Pipeline.P_MD, Pipeline.P_RLD_MD]), modes)
async def test_whatever_happens_in_whatever_order_nothing_leaks(steps, pipeline, mode):
    """Engines answer with the truth for the index that they are at; the user sees a prefix of the truth."""
    truth = list(range(100, 200))
    at = {}
    async with Scene(pipeline, mode=mode) as scene:
        for step in steps:
            if scene.run.finish or scene.error:
                break
            for engine in {"p": [scene.p], "r": [scene.rld], "m": [scene.md]}.get(step[0], []):
                for session in engine.live:
                    _play(step, session, truth, at)
            _fault(step, scene)
            await scene.settle()
            decoding = [s for e in (scene.rld, scene.md) for s in e.live if s.takeovers]
            assert len(decoding) <= 1, "INV-HANDOFF-2: at most one session is told to decode at a time"
            for told in scene.rld.told + scene.md.told:
                assert told <= len(scene.seen), "INV-HANDOFF-3: engines are told what the user has, nothing else"
        assert scene.seen == truth[: len(scene.seen)]
        if not scene.run.finish and not scene.error:
            able = (scene.rld.live + scene.md.live) if scene.seen else scene.p.live
            assert able, "somebody can still make the next token"


def _play(step, session, truth, at):
    if step == "p0" and session not in at:
        at[session] = 1
        session.tokens(0, truth[0])
        session.finished(None)
    elif step.endswith("_open"):
        session.opened()
    elif step == "main_extended" and session.extends:
        session.extended()
    elif step in ("relay", "main", "relay_end") and session.takeovers:
        index = at.setdefault(session, sum(map(len, session.extends + session.takeovers)))
        at[session] += 1
        session.tokens(index, truth[index], last=step == "relay_end")
        if step == "relay_end":
            session.finished("stop")


def _fault(step, scene):
    engine = {"lose_relay": scene.rld, "lose_main": scene.md, "lose_p": scene.p}.get(step)
    for session in engine.live if engine else []:
        session.lose()
    notice = {
        "line": Notice.LINE_DOWN,
        "pages": Notice.PAGES_LOST,
        "depot": Notice.DEPOT_DOWN,
        "far_depot": Notice.MAIN_DEPOT_DOWN,
    }.get(step)
    if notice:
        scene.run.notify(notice)


async def test_tokens_are_held_back_until_they_can_fill_the_pause_of_the_switch():
    async with Scene(mode="catch_up", pace=4.0) as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.md.last.opened()
        for index in range(1, 15):
            scene.rld.last.tokens(index, 100 + index)
            await asyncio.sleep(0.02)
            if scene.md.last.extends or scene.md.last.takeovers:
                scene.md.last.extended()
            if scene.rld.last.aborted:
                break
        await scene.until(lambda: bool(scene.md.last.takeovers))
        trace = await scene.run.trace()
        assert trace.held_back >= 1
        assert trace.handoff_index == len(trace.token_ids)
        scene.md.last.tokens(trace.handoff_index, 7, last=True)
        scene.md.last.finished("stop")
        await scene.settle()
        assert scene.seen == (await scene.run.trace()).token_ids, "at the end nothing stays back"
        trace = await scene.run.trace()
        assert trace.handoff_extends[-1].tokens >= 0
        assert trace.relay_extra_tokens > 0


async def test_a_silent_relay_is_not_waited_for():
    async with Scene(mode="catch_up", pace=4.0) as scene:
        await scene.prefill()
        scene.rld.last.opened()
        scene.md.last.opened()
        await scene.until(lambda: bool(scene.md.last.takeovers))
        assert scene.rld.last.aborted
        assert scene.md.last.takeovers == [[100]]
