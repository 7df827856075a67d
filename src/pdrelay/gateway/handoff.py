"""One request's handoff: what it has seen of the relay and of main decode, and what the policy says of it now."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pdrelay.engine.base import Engine
from pdrelay.gateway.base import Extend, GenerationRequest, Tier
from pdrelay.gateway.legs import Leg
from pdrelay.gateway.pacing import Pacer
from pdrelay.gateway.splice import Splice
from pdrelay.policy.handoff import (
    Action,
    Decision,
    Mode,
    RelayedRequest,
    Settings,
    State,
    decide,
    observe_extend,
    stays,
)

RECENT = 16
"""Arrivals of which the mean interval between the relay's tokens is taken."""


class Handoffs:
    """What all handoffs of a gateway share: the operator's settings, and what the policy remembers."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.state = settings, State()


class Terms(NamedTuple):
    """What is fixed for one request."""

    round_trip: float  # seconds between gateway and main decode
    max_tokens: int
    max_gap: float = 0.0  # longest pause that the client accepts, seconds; 0 when it did not say
    forced_mode: Mode | None = None
    forced_at: int | None = None

    @classmethod
    def of(cls, request: GenerationRequest, round_trip: float) -> Terms:
        """Those of `request`."""
        debug = request.debug
        return cls(round_trip, request.sampling.max_tokens, request.max_gap, debug.handoff_mode, debug.handoff_at)


class Handoff:
    """Feeds `policy/handoff.py`, and sets the pace of the reader's stream. Times are in seconds since arrival."""

    def __init__(self, shared: Handoffs, terms: Terms, splice: Splice, pacer: Pacer) -> None:
        self._shared, self._terms, self._splice, self._pacer = shared, terms, splice, pacer
        self.mode: Mode = terms.forced_mode or "one_shot"
        self.extends: list[Extend] = []
        self.extra_tokens = 0
        self._relay: Engine | None = None
        self._opened = 0.0
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=RECENT)  # when the relay had made how many
        self._ready_at: int | None = None  # tokens when main decode was first ready
        self._told: tuple[int, int, float] | None = None  # tokens told that it did not know, tokens made, when

    def relay_opened(self, relay: Engine, now: float) -> None:
        """The request occupies `relay` from now on."""
        self._relay, self._opened = relay, now

    def relay_decoded(self, now: float) -> None:
        """Tokens of the relay came."""
        self._arrivals.append((now, self._splice.made_by(Tier.RELAY)))

    def action(self, main: Leg, now: float) -> Action:
        """What to do now with a request that the relay decodes."""
        if not main.opened and self.stays():
            return Action.STAY
        self._shared.state, decision = decide(self._shared.settings, self._shared.state, self._view(main, now))
        self.mode = decision.mode
        if main.opened and self._ready_at is None:
            self._ready_at = len(self._splice.tokens)
        self._set_pace(decision)
        return decision.action

    def stays(self) -> bool:
        """Whether there is nothing to decide while main decode is not ready: true of most looks."""
        if self._terms.forced_at is not None:
            return False
        return stays(self._shared.settings, self._shared.state, self._relay_name, self._relay_kv_usage)

    def told(self, main: Leg, tokens: int, now: float) -> None:
        """Main decode is being told the first `tokens` tokens, to extend or to take over."""
        self._told = tokens - main.known, len(self._splice.tokens), now

    def computed(self, main: Leg, now: float) -> None:
        """Main decode has computed what it was told."""
        if self._told is None:
            return
        (tokens, made, since), self._told = self._told, None
        seconds = now - since
        self.extends.append(Extend(tokens, seconds, len(self._splice.tokens) - made))
        state, compute = self._shared.state, max(seconds - self._terms.round_trip, 0.0)
        self._shared.state = observe_extend(state, main.instance, tokens, compute)

    def switched(self) -> None:
        """The relay has stopped: what is held back fills the time until main decode's first token."""
        self.extra_tokens = len(self._splice.tokens) - (self._ready_at or len(self._splice.tokens))
        last = self.extends[-1].seconds if self.extends else self._terms.round_trip
        self._pacer.spread(last, self._interval)

    def main_decoded(self) -> None:
        """Main decode's tokens come."""
        self._pacer.catch_up(self._interval)

    @property
    def _interval(self) -> float:
        """Mean time between the relay's latest tokens; 0 when not known."""
        if len(self._arrivals) < 2:
            return 0.0
        (since, before), (until, made) = self._arrivals[0], self._arrivals[-1]
        return (until - since) / (made - before)

    @property
    def _relay_name(self) -> str:
        return self._relay.instance if self._relay is not None else ""

    @property
    def _relay_kv_usage(self) -> float:
        """0 when it has not told."""
        load = self._relay.status.load if self._relay is not None else None
        return load.kv_usage if load else 0.0

    def _set_pace(self, decision: Decision) -> None:
        if decision.hold_back:
            self._pacer.hold_back(decision.hold_back, self._interval * self._shared.settings.pace)
        elif decision.action is not Action.SWITCH:
            self._pacer.release()

    def _view(self, main: Leg, now: float) -> RelayedRequest:
        terms, tokens = self._terms, len(self._splice.tokens)
        return RelayedRequest(
            tokens=tokens,
            relay_tokens=self._splice.made_by(Tier.RELAY),
            relay_seconds=now - self._opened,
            relay_kv_usage=self._relay_kv_usage,
            main_ready=main.opened,
            relay=self._relay_name,
            main=main.instance,
            main_known=main.known,
            main_busy=main.busy,
            rounds=len(self.extends),
            held=self._pacer.held,
            remaining=terms.max_tokens - tokens,
            token_interval=self._interval,
            relay_silence=now - (self._arrivals[-1][0] if self._arrivals else self._opened),
            round_trip=terms.round_trip,
            quickest_round=min((extend.seconds for extend in self.extends), default=0.0),
            max_gap=terms.max_gap,
            forced_mode=terms.forced_mode,
            forced_at=terms.forced_at,
        )
