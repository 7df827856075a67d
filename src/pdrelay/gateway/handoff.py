"""One request's handoff: what it has seen of the relay, and what the policy says of it now."""

from __future__ import annotations

from pdrelay.engine.base import Engine
from pdrelay.gateway.base import Tier
from pdrelay.gateway.legs import Leg
from pdrelay.gateway.splice import Splice
from pdrelay.policy.handoff import Action, Mode, RelayBound, RelayedRequest, decide


class Handoff:
    """Feeds `policy/handoff.py`. Times are in seconds since the request's arrival."""

    def __init__(self, mode: Mode, bound: RelayBound, round_trip: float, forced_at: int | None) -> None:
        self.mode: Mode = mode
        self.rounds = 0  # extends so far
        self._bound, self._round_trip, self._forced_at = bound, round_trip, forced_at
        self._relay: Engine | None = None
        self._opened = 0.0
        self._first_token: float | None = None

    def relay_opened(self, relay: Engine, now: float) -> None:
        """The request occupies `relay` from now on."""
        self._relay, self._opened = relay, now

    def relay_decoded(self, now: float) -> None:
        """Tokens of the relay came."""
        if self._first_token is None:
            self._first_token = now

    def action(self, splice: Splice, main: Leg, now: float) -> Action:
        """What to do now with a request that the relay decodes."""
        load = self._relay.status.load if self._relay is not None else None
        made = splice.made_by[Tier.RELAY]
        request = RelayedRequest(
            tokens=len(splice.tokens),
            relay_tokens=made,
            relay_seconds=now - self._opened,
            relay_kv_usage=load.kv_usage if load else 0.0,
            main_ready=main.opened,
            main_known=main.known,
            main_busy=main.busy,
            rounds=self.rounds,
            token_interval=self._interval(made, now),
            round_trip=self._round_trip,
            forced_at=self._forced_at,
        )
        return decide(self.mode, request, self._bound)

    def _interval(self, made: int, now: float) -> float:
        """Mean time between the relay's tokens so far."""
        return (now - self._first_token) / (made - 1) if self._first_token is not None and made > 1 else 0.0
