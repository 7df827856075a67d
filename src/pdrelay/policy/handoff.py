"""When and how MainDecode takes over from the relay.

One-Shot (PDD, "One-Shot Handoff Mode"): as soon as MainDecode has the prompt's KV the relay stops, MainDecode computes
the relay's tokens in one forward and goes on. It is stop-and-copy: the reader waits for that forward and a round trip.

Catch-Up (PDD, "Catch-Up Handoff Mode"): MainDecode computes what the relay has made while the relay goes on, then what
it made meanwhile, until the rest is what the switch itself takes. It is live migration by pre-copy. A few tokens are
held back meanwhile, by showing them a little slower than they are made; they fill the time of the switch.

Dynamic: One-Shot where its pause would not be noticed or the relay is needed by others, else Catch-Up.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from pdrelay.policy.learned import LinearCost

Mode = Literal["one_shot", "catch_up"]
Preference = Literal["one_shot", "catch_up", "dynamic"]

MAX_ROUNDS = 8
"""Extends after which Catch-Up switches although it does not gain on the relay: MainDecode may be slower."""

MAX_PACED_ROUNDS = 32
"""Extends after which Catch-Up switches although not enough is held back to fill the pause."""

MAX_EXTEND = 256
"""Tokens that MainDecode is told in one round: its other requests wait for that forward (PDD, Table 5: about 3 ms a
token), and after a long stay on the relay there are thousands."""

MAX_HELD = 32
"""Tokens that are held back at most."""

SILENCE = 0.25
"""Seconds, or if longer SILENT_INTERVALS token intervals, after which a relay is not waited for any more."""

SILENT_INTERVALS = 8

UNNOTICED = 1.5
"""A pause of so many token intervals is within the jitter of any stream."""


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


class Settings(NamedTuple):
    """The operator's choices."""

    preference: Preference
    bound: RelayBound
    pace: float = 1.25  # while tokens are held back they are shown so many times slower; 1 holds nothing back
    strain: float = 0.85  # relay KV usage from which it should be left at once ...
    relief: float = 0.7  # ... until it falls below this


class State(NamedTuple):
    """What the policy remembers."""

    strained: frozenset[str] = frozenset()  # relays
    extends: Mapping[str, LinearCost] = MappingProxyType({})  # seconds of an extend by its tokens, by main instance


class RelayedRequest(NamedTuple):
    """A relayed request as the policy sees it. Times in seconds."""

    tokens: int  # output tokens that the relay has made, token 0 included
    relay_tokens: int
    relay_seconds: float
    relay_kv_usage: float
    main_ready: bool
    relay: str = ""
    main: str = ""
    main_known: int = 0  # output tokens that MainDecode was told
    main_busy: bool = False  # it computes an extend
    rounds: int = 0  # extends so far
    held: int = 0  # tokens that the reader has not been shown yet
    remaining: int = 1 << 30  # tokens that the request may still make
    relay_silence: float = 0.0  # since its last token
    token_interval: float = 0.0  # between the relay's tokens; 0 when not known
    round_trip: float = 0.0  # between gateway and MainDecode
    quickest_round: float = 0.0  # of its extends so far, line included; 0 before the first
    max_gap: float = 0.0  # longest pause that the client accepts; 0 when it did not say
    forced_mode: Mode | None = None  # debug control
    forced_at: int | None = None  # debug control: first index that MainDecode emits


class Decision(NamedTuple):
    """What to do, and how many tokens the reader's stream shall be kept behind."""

    action: Action
    mode: Mode
    hold_back: int = 0


def observe_extend(state: State, main: str, tokens: int, seconds: float) -> State:
    """MainDecode instance `main` computed `tokens` known tokens in `seconds`, the line not counted."""
    learned = state.extends.get(main, LinearCost()).observe(tokens, seconds)
    return state._replace(extends=MappingProxyType({**state.extends, main: learned}))


def decide(settings: Settings, state: State, request: RelayedRequest) -> tuple[State, Decision]:
    """The next action.

    A request beyond its bound stays while the relay has room, since stopping it would stall the reader; under
    pressure it is held, since a relay that is full stalls everybody.
    """
    state = _strain(settings, state, request)
    mode = request.forced_mode or _mode(settings, state, request)
    if request.forced_at is not None and request.tokens >= request.forced_at:
        return state, Decision(Action.SWITCH if request.main_ready else Action.HOLD, mode)
    over = _over(settings.bound, request)
    if not request.main_ready:
        pressed = over and request.relay_kv_usage >= settings.bound.pressure and request.forced_at is None
        return state, Decision(Action.HOLD if pressed else Action.STAY, mode)
    if request.forced_at is None and not over and request.remaining <= made_during_switch(request):
        return state, Decision(Action.STAY, mode)  # it ends before MainDecode could help
    if mode == "one_shot":
        return state, Decision(Action.STAY if request.forced_at is not None else Action.SWITCH, mode)
    silent = request.relay_silence > max(SILENCE, SILENT_INTERVALS * request.token_interval)
    hurry = over or silent or request.relay in state.strained
    return state, _catch_up(request, 0 if hurry else _hold_back(settings, request))


def stays(settings: Settings, state: State, relay: str, kv_usage: float) -> bool:
    """Whether `decide` lets every request stay at `relay` for which MainDecode is not ready and no index is forced:
    what else is true of it need not be looked at then."""
    return kv_usage < min(settings.bound.pressure, settings.strain) and relay not in state.strained


def made_during_switch(request: RelayedRequest) -> int:
    """Tokens that the relay makes in one round trip and one step of MainDecode, or in the quickest round so far:
    less cannot be left when the switch is decided."""
    if not request.token_interval:
        return 1
    steps = 1 + math.ceil(request.round_trip / request.token_interval)
    return max(steps, math.ceil(request.quickest_round / request.token_interval))


def bound_now(bound: RelayBound, kv_usage: float) -> RelayBound:
    """The bound at this relay load: whole up to half full, a quarter when it is under pressure."""
    share = (kv_usage - 0.5) / max(bound.pressure - 0.5, 1e-9)
    factor = 1 - 0.75 * min(max(share, 0.0), 1.0)
    return bound._replace(tokens=max(1, int(bound.tokens * factor)), seconds=bound.seconds * factor)


def _over(bound: RelayBound, request: RelayedRequest) -> bool:
    now = bound_now(bound, request.relay_kv_usage)
    return request.relay_tokens >= now.tokens or request.relay_seconds >= now.seconds


def _strain(settings: Settings, state: State, request: RelayedRequest) -> State:
    usage, strained = request.relay_kv_usage, request.relay in state.strained
    if not strained and usage >= settings.strain:
        return state._replace(strained=state.strained | {request.relay})
    if strained and usage < settings.relief:
        return state._replace(strained=state.strained - {request.relay})
    return state


def _mode(settings: Settings, state: State, request: RelayedRequest) -> Mode:
    if settings.preference != "dynamic":
        return settings.preference
    if request.relay in state.strained:
        return "one_shot"
    extend = state.extends.get(request.main, LinearCost()).predict(request.tokens - request.main_known)
    if extend is None:
        return "catch_up"
    accepted = max(request.max_gap, UNNOTICED * request.token_interval)
    return "one_shot" if extend + request.round_trip <= accepted else "catch_up"


def _hold_back(settings: Settings, request: RelayedRequest) -> int:
    """Tokens that fill the pause of the switch; some, when their interval is not known yet."""
    if settings.pace <= 1 or request.forced_at is not None:
        return 0
    return min(made_during_switch(request), MAX_HELD, request.remaining)


def _catch_up(request: RelayedRequest, hold_back: int) -> Decision:
    rest = request.tokens - request.main_known
    near = rest <= made_during_switch(request)
    if request.main_busy:
        action = Action.STAY
    elif request.forced_at is not None:
        action = Action.EXTEND if rest and request.rounds < MAX_ROUNDS else Action.STAY
    elif near:
        ready = request.held >= hold_back or request.rounds >= MAX_PACED_ROUNDS
        action = Action.SWITCH if ready else Action.STAY
    else:
        rounds = MAX_PACED_ROUNDS if hold_back or rest > MAX_EXTEND else MAX_ROUNDS
        action = Action.EXTEND if request.rounds < rounds else Action.SWITCH
    return Decision(action, "catch_up", hold_back)
