"""When MainDecode takes over from the relay.

One-Shot (PDD, "One-Shot Handoff Mode"): as soon as MainDecode has the prompt's KV the relay stops, MainDecode computes
the relay's tokens in one forward and goes on.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Action(enum.Enum):
    """What to do with a relayed request now."""

    STAY = "stay"  # the relay goes on
    HOLD = "hold"  # the relay stops, MainDecode is awaited
    SWITCH = "switch"  # the relay stops, MainDecode takes over


class RelayBound(NamedTuple):
    """How long one request may occupy the relay ("time-bounded occupation")."""

    tokens: int
    seconds: float
    pressure: float = 0.95  # relay KV usage from which the bound is enforced although MainDecode is not ready


class RelayedRequest(NamedTuple):
    """A relayed request as the policy sees it."""

    tokens: int  # output tokens that the user has
    relay_tokens: int
    relay_seconds: float
    relay_kv_usage: float
    main_ready: bool
    forced_at: int | None = None  # debug control: first index that MainDecode emits


def one_shot(request: RelayedRequest, bound: RelayBound) -> Action:
    """Switch once MainDecode is ready.

    A request beyond its bound stays while the relay has room, since stopping it would stall the reader; under
    pressure it is held, since a relay that is full stalls everybody.
    """
    if request.forced_at is not None:
        return _forced(request, request.forced_at)
    if request.main_ready:
        return Action.SWITCH
    over = request.relay_tokens >= bound.tokens or request.relay_seconds >= bound.seconds
    return Action.HOLD if over and request.relay_kv_usage >= bound.pressure else Action.STAY


def _forced(request: RelayedRequest, at: int) -> Action:
    if request.tokens < at:
        return Action.STAY
    return Action.SWITCH if request.main_ready else Action.HOLD
