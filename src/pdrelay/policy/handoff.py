"""When and how MainDecode takes over from the relay.

One-Shot (PDD, "One-Shot Handoff Mode"): as soon as MainDecode has the prompt's KV the relay stops, MainDecode computes
the relay's tokens in one forward and goes on.

Catch-Up (PDD, "Catch-Up Handoff Mode"): MainDecode computes what the relay has made while the relay goes on, then what
it made meanwhile, until the rest is what the switch itself takes. It is live migration by pre-copy; One-Shot is
stop-and-copy.
"""

from __future__ import annotations

import enum
import math
from typing import Literal, NamedTuple

Mode = Literal["one_shot", "catch_up"]

MAX_ROUNDS = 8
"""Extends after which Catch-Up switches whatever is left: MainDecode may be slower than the relay."""


class Action(enum.Enum):
    """What to do with a relayed request now."""

    STAY = "stay"  # the relay goes on
    EXTEND = "extend"  # the relay goes on, MainDecode computes what it has made
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
    main_known: int = 0  # output tokens that MainDecode was told
    main_busy: bool = False  # it computes an extend
    rounds: int = 0  # extends so far
    token_interval: float = 0.0  # seconds between the relay's tokens; 0 when not known
    round_trip: float = 0.0  # seconds between gateway and MainDecode
    forced_at: int | None = None  # debug control: first index that MainDecode emits


def decide(mode: Mode, request: RelayedRequest, bound: RelayBound) -> Action:
    """The next action.

    A request beyond its bound stays while the relay has room, since stopping it would stall the reader; under
    pressure it is held, since a relay that is full stalls everybody.
    """
    if request.forced_at is not None and request.tokens >= request.forced_at:
        return Action.SWITCH if request.main_ready else Action.HOLD
    if not request.main_ready:
        over = request.relay_tokens >= bound.tokens or request.relay_seconds >= bound.seconds
        forced = request.forced_at is not None
        return Action.HOLD if over and request.relay_kv_usage >= bound.pressure and not forced else Action.STAY
    if mode == "catch_up":
        return _catch_up(request)
    return Action.STAY if request.forced_at is not None else Action.SWITCH


def _catch_up(request: RelayedRequest) -> Action:
    if request.main_busy:
        return Action.STAY
    rest = request.tokens - request.main_known
    done = rest <= made_during_switch(request) or request.rounds >= MAX_ROUNDS
    if done and request.forced_at is None:
        return Action.SWITCH
    return Action.EXTEND if rest and request.rounds < MAX_ROUNDS else Action.STAY


def made_during_switch(request: RelayedRequest) -> int:
    """Tokens that the relay makes in one round trip and one step: less cannot be left when the switch is decided."""
    if not request.token_interval:
        return 1
    return 1 + math.ceil(request.round_trip / request.token_interval)
