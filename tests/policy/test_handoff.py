import pytest

from pdrelay.policy.handoff import MAX_ROUNDS, Action, RelayBound, RelayedRequest, decide, made_during_switch

BOUND = RelayBound(tokens=100, seconds=10.0, pressure=0.9)
FRESH = RelayedRequest(tokens=5, relay_tokens=4, relay_seconds=1.0, relay_kv_usage=0.1, main_ready=False)


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({}, Action.STAY),
        ({"main_ready": True}, Action.SWITCH),
        ({"relay_tokens": 100}, Action.STAY),
        ({"relay_tokens": 100, "relay_kv_usage": 0.9}, Action.HOLD),
        ({"relay_seconds": 10.0, "relay_kv_usage": 0.9}, Action.HOLD),
        ({"relay_kv_usage": 1.0}, Action.STAY),
        ({"forced_at": 6, "main_ready": True}, Action.STAY),
        ({"forced_at": 5, "main_ready": True}, Action.SWITCH),
        ({"forced_at": 5}, Action.HOLD),
    ],
)
def test_one_shot(change, action):
    assert decide("one_shot", FRESH._replace(**change), BOUND) is action


READY = FRESH._replace(tokens=40, main_ready=True, token_interval=0.03, round_trip=0.03)


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({}, Action.EXTEND),
        ({"main_busy": True}, Action.STAY),
        ({"main_known": 37}, Action.EXTEND),
        ({"main_known": 38}, Action.SWITCH),
        ({"main_known": 40}, Action.SWITCH),
        ({"rounds": MAX_ROUNDS}, Action.SWITCH),
        ({"main_ready": False}, Action.STAY),
        ({"forced_at": 50, "main_known": 38}, Action.EXTEND),
        ({"forced_at": 50, "main_known": 40}, Action.STAY),
        ({"forced_at": 50, "rounds": MAX_ROUNDS}, Action.STAY),
        ({"forced_at": 40, "main_busy": True}, Action.SWITCH),
        ({"forced_at": 40, "main_ready": False}, Action.HOLD),
    ],
)
def test_catch_up(change, action):
    assert decide("catch_up", READY._replace(**change), BOUND) is action


@pytest.mark.parametrize(("round_trip", "left"), [(0.0, 1), (0.03, 2), (0.031, 3), (0.2, 8)])
def test_what_is_left_is_what_a_round_trip_and_a_step_make(round_trip, left):
    assert made_during_switch(READY._replace(round_trip=round_trip)) == left


def test_catch_up_ends_although_main_decode_is_slower_than_the_relay():
    request, steps = READY, 0
    while (action := decide("catch_up", request, BOUND)) is Action.EXTEND:
        request = request._replace(
            main_known=request.tokens, tokens=request.tokens + 2 * (request.tokens - request.main_known),
            rounds=request.rounds + 1,
        )  # fmt: skip
        steps += 1
    assert action is Action.SWITCH
    assert steps <= MAX_ROUNDS
