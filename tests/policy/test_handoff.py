import pytest

from pdrelay.policy.handoff import Action, RelayBound, RelayedRequest, one_shot

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
    assert one_shot(FRESH._replace(**change), BOUND) is action
