import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.policy.handoff import (
    MAX_EXTEND,
    MAX_PACED_ROUNDS,
    MAX_ROUNDS,
    Action,
    RelayBound,
    RelayedRequest,
    Settings,
    State,
    bound_now,
    decide,
    made_during_switch,
    observe_extend,
    stays,
)

BOUND = RelayBound(tokens=100, seconds=10.0, pressure=0.9)
FRESH = RelayedRequest(
    tokens=5, relay_tokens=4, relay_seconds=1.0, relay_kv_usage=0.1, main_ready=False, relay="r", main="m"
)
READY = FRESH._replace(tokens=40, main_ready=True, token_interval=0.03, round_trip=0.03)


def action(preference, request, state=None, pace=1.0):
    return decide(Settings(preference, BOUND, pace), state or State(), request)[1].action


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Action.STAY),
        ({"main_ready": True}, Action.SWITCH),
        ({"main_ready": True, "remaining": 1}, Action.STAY),
        ({"relay_tokens": 100}, Action.STAY),
        ({"relay_tokens": 25, "relay_kv_usage": 0.9}, Action.HOLD),
        ({"relay_seconds": 10.0, "relay_kv_usage": 0.9}, Action.HOLD),
        ({"relay_kv_usage": 1.0}, Action.STAY),
        ({"forced_at": 6, "main_ready": True}, Action.STAY),
        ({"forced_at": 5, "main_ready": True}, Action.SWITCH),
        ({"forced_at": 5}, Action.HOLD),
    ],
)
def test_one_shot(change, expected):
    assert action("one_shot", FRESH._replace(**change)) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Action.EXTEND),
        ({"main_busy": True}, Action.STAY),
        ({"main_known": 37}, Action.EXTEND),
        ({"main_known": 38}, Action.SWITCH),
        ({"main_known": 40}, Action.SWITCH),
        ({"rounds": MAX_ROUNDS}, Action.SWITCH),
        ({"main_ready": False}, Action.STAY),
        ({"rounds": MAX_ROUNDS, "tokens": MAX_EXTEND + 1}, Action.EXTEND),
        ({"rounds": MAX_PACED_ROUNDS, "tokens": MAX_EXTEND + 1}, Action.SWITCH),
        ({"forced_at": 50, "main_known": 38}, Action.EXTEND),
        ({"forced_at": 50, "main_known": 40}, Action.STAY),
        ({"forced_at": 50, "rounds": MAX_ROUNDS}, Action.STAY),
        ({"forced_at": 40, "main_busy": True}, Action.SWITCH),
        ({"forced_at": 40, "main_ready": False}, Action.HOLD),
    ],
)
def test_catch_up(change, expected):
    assert action("catch_up", READY._replace(**change)) is expected


@pytest.mark.parametrize(("round_trip", "left"), [(0.0, 1), (0.03, 2), (0.031, 3), (0.2, 8)])
def test_what_is_left_is_what_a_round_trip_and_a_step_make(round_trip, left):
    assert made_during_switch(READY._replace(round_trip=round_trip)) == left


def test_a_main_decode_whose_rounds_take_longer_is_not_waited_for_in_vain():
    request = READY._replace(main_known=36)
    assert action("catch_up", request) is Action.EXTEND
    assert action("catch_up", request._replace(quickest_round=0.12)) is Action.SWITCH


def test_the_switch_waits_until_its_pause_can_be_filled():
    near = READY._replace(main_known=39)
    _, decision = decide(Settings("catch_up", BOUND, pace=1.25), State(), near)
    assert (decision.action, decision.hold_back) == (Action.STAY, 2)
    assert action("catch_up", near._replace(held=3), pace=1.25) is Action.SWITCH
    for hurry in (
        {"relay_silence": 0.3}, {"relay_tokens": 100}, {"relay_kv_usage": 0.9}, {"rounds": MAX_PACED_ROUNDS}
    ):  # fmt: skip
        assert action("catch_up", near._replace(**hurry), pace=1.25) is Action.SWITCH, hurry


def test_dynamic_takes_one_shot_where_its_pause_is_not_noticed():
    assert action("dynamic", READY) is Action.EXTEND, "nothing is known of the extend's time"
    quick = observe_extend(State(), "m", 10, 0.01)
    assert action("dynamic", READY, quick) is Action.SWITCH, "40 ms against 1.5 intervals of 30 ms"
    slow = observe_extend(State(), "m", 10, 0.1)
    assert action("dynamic", READY, slow) is Action.EXTEND
    assert action("dynamic", READY._replace(max_gap=0.2), slow) is Action.SWITCH, "the client accepts 200 ms"


def test_a_strained_relay_is_left_at_once_until_it_has_recovered():
    settings, slow = Settings("dynamic", BOUND), observe_extend(State(), "m", 10, 0.1)
    expected = [(0.8, "catch_up"), (0.86, "one_shot"), (0.75, "one_shot"), (0.69, "catch_up"), (0.8, "catch_up")]
    state, modes = slow, []
    for usage, _ in expected:
        state, decision = decide(settings, state, READY._replace(relay_kv_usage=usage))
        modes.append((usage, decision.mode))
    assert modes == expected


def test_the_bound_shrinks_with_the_relays_load():
    bounds = [bound_now(BOUND, usage) for usage in (0.0, 0.5, 0.7, 0.9, 1.0)]
    assert [bound.tokens for bound in bounds] == [100, 100, 62, 25, 25]
    assert bounds[3].seconds == 2.5


@given(
    usage=st.floats(0, 1),
    tokens=st.integers(1, 1000),
    seconds=st.floats(0, 100),
    strained=st.booleans(),
    preference=st.sampled_from(["one_shot", "catch_up", "dynamic"]),
)
def test_what_is_said_to_stay_is_decided_to_stay(usage, tokens, seconds, strained, preference):
    settings, state = Settings(preference, BOUND), State(strained=frozenset({"r"} if strained else ()))
    request = FRESH._replace(relay_kv_usage=usage, relay_tokens=tokens, relay_seconds=seconds)
    if stays(settings, state, "r", usage):
        after, decision = decide(settings, state, request)
        assert (after, decision.action, decision.hold_back) == (state, Action.STAY, 0)
    else:
        assert strained or usage >= settings.strain


@given(made=st.integers(1, 5), pace=st.sampled_from([1.0, 1.25]), round_trip=st.floats(0, 0.3), reserve=st.booleans())
def test_catch_up_ends_however_fast_the_relay_is(made, pace, round_trip, reserve):
    """While MainDecode computes one extend the relay makes `made` times the tokens of that extend."""
    settings, state = Settings("catch_up", BOUND._replace(tokens=1 << 30), pace), State()
    request, steps = READY._replace(round_trip=round_trip), 0
    while True:
        state, decision = decide(settings, state, request)
        if decision.action is Action.SWITCH:
            break
        steps += 1
        fresh = made * (request.tokens - request.main_known) if decision.action is Action.EXTEND else 1
        known = request.tokens if decision.action is Action.EXTEND else request.main_known
        rounds = request.rounds + (decision.action is Action.EXTEND)
        held = min(request.held + reserve, decision.hold_back)
        request = request._replace(tokens=request.tokens + max(fresh, 1), main_known=known, rounds=rounds, held=held)
        assert steps < 500
