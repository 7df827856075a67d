"""One request's handoff in the simulator: feeds `policy/handoff.py`, as `gateway/handoff.py` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdrelay.policy.handoff import MAX_EXTEND, Action, RelayedRequest, Settings, State, decide, observe_extend
from pdrelay.sim.engine import Engine
from pdrelay.sim.events import Event, Events
from pdrelay.sim.parts import Instance
from pdrelay.sim.record import Record
from pdrelay.sim.work import Forward, Sequence

CHECK = 1.0
"""Seconds between two looks at a relayed request whose KV is still under way."""


class Handoffs:
    """What all handoffs share: the operator's settings, and what the policy remembers."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.state = settings, State()


class Owner(Protocol):
    """The request's life, as the handoff sees it."""

    record: Record
    prompt: int
    output: int
    base: int  # tokens that prefill made: 1, or 0 where it shows none

    def main_engine(self) -> Engine:
        """The rank of main decode that the request is on."""
        ...

    def main_decodes(self, known: int, tokens: int) -> None:
        """Main decode goes on after `tokens` output tokens, of which it has computed `known`."""
        ...


class Relaying:
    """From the relay's first step to the switch."""

    def __init__(
        self, events: Events, shared: Handoffs, owner: Owner, relay: Instance, main: Instance, round_trip: float
    ) -> None:
        self._events, self._shared, self._owner = events, shared, owner
        self._relay, self._main, self._round_trip = relay, main, round_trip
        self.engine: Engine | None = None
        self.sequence: Sequence | None = None
        self.main_ready = self.over = self.alone = False  # alone: main decode is lost, the relay finishes
        self._opened = events.now
        self._known = self._rounds = 0
        self._busy = False
        self._stopped_at = -1  # relay tokens, once it was stopped
        self._stopped = 0.0  # when
        self._hold_back = self._held_tokens = 0
        self._quickest_round = 0.0  # of its extends, line included
        self._holding_since = self._interval = 0.0
        self._made_before = 0  # tokens that were shown before any was held back
        self._check: Event | None = None

    def start(self, remaining: int, on_end: Callable[[], None]) -> None:
        """The relay has the pages and decodes from token 0."""
        owner = self._owner
        self.engine = self._relay.rank()
        self.sequence = Sequence(owner.prompt + owner.base, remaining, on_end)
        self._opened = self._events.now
        self.engine.decode(self.sequence)
        self.consider()

    def ready(self) -> None:
        """The gateway has heard that main decode has the pages."""
        self.main_ready = True
        if self.stopped and not self.over:
            self._switch()
        elif self.sequence is not None:
            self.consider()

    def end(self) -> int:
        """The relay made the last token, or is lost: nothing is decided any more; returns its tokens."""
        self.over = True
        if self._check is not None:
            self._check.cancel()
        return self._made()

    def relay_lost(self) -> None:
        """The relay died: main decode goes on from what the user has."""
        if self._stopped_at < 0:
            self._stopped_at, self._stopped = self._made(), self._events.now
        if self.main_ready and not self.over:
            self._switch()

    @property
    def stopped(self) -> bool:
        """True when the relay makes no more tokens although the request has not ended."""
        return self._stopped_at >= 0

    @property
    def made(self) -> int:
        """Tokens that the relay has made."""
        return self._made()

    # ---- decisions ----

    def consider(self) -> None:
        """Does what the policy says now."""
        if self.over or self.alone or self.sequence is None or self.stopped:
            return
        if self._check is not None:
            self._check.cancel()
            self._check = None
        self._shared.state, decision = decide(self._shared.settings, self._shared.state, self._view())
        if decision.hold_back and not self._hold_back:
            self._holding_since, self._made_before = self._events.now, self._made()
        self._hold_back = decision.hold_back
        match decision.action:
            case Action.EXTEND:
                self._extend()
            case Action.SWITCH | Action.HOLD:
                self._stop_relay()
                if decision.action is Action.SWITCH:
                    self._switch()
            case Action.STAY if not self._busy:
                self._check = self._events.after(self._until_next_look(), self.consider)

    def _until_next_look(self) -> float:
        """While pages are under way only the relay's bound matters; afterwards every token does."""
        if self.main_ready:
            return max(self._token_interval(), 1e-3)
        assert self.engine is not None
        bound, interval = self._shared.settings.bound, self._token_interval()
        tokens = (bound.tokens / 4 - self._made()) * interval  # it never shrinks below a quarter
        wait = min(tokens, bound.seconds / 4 - (self._events.now - self._opened))
        return max(wait, 4 * interval if self.engine.kv_usage > bound.pressure - 0.1 else CHECK)

    def _view(self) -> RelayedRequest:
        made = self._made()
        return RelayedRequest(
            tokens=self._owner.base + made,
            relay_tokens=made,
            relay_seconds=self._events.now - self._opened,
            relay_kv_usage=self.engine.kv_usage if self.engine is not None else 0.0,
            main_ready=self.main_ready,
            relay=self._relay.name,
            main=self._main.name,
            main_known=self._known,
            main_busy=self._busy,
            rounds=self._rounds,
            held=self._tokens_held(),
            remaining=self._owner.output - self._owner.base - made,
            token_interval=self._token_interval() if made > 1 else 0.0,
            round_trip=self._round_trip,
            quickest_round=self._quickest_round,
        )

    def _made(self) -> int:
        if self._stopped_at >= 0:
            return self._stopped_at
        if self.engine is None or self.sequence is None:
            return 0
        return self.engine.made(self.sequence)

    def _token_interval(self) -> float:
        """Mean time between the relay's tokens so far, or what a step takes now."""
        assert self.engine is not None
        return self.engine.step_seconds

    def _tokens_held(self) -> int:
        """Tokens made but not shown: they are shown `pace` times slower than they are made, until enough are held."""
        if not self._hold_back:
            return 0
        spacing = self._token_interval() * self._shared.settings.pace
        shown = int((self._events.now - self._holding_since) / max(spacing, 1e-9))
        return max(0, min(self._hold_back, self._made() - self._made_before - shown))

    # ---- actions ----

    def _extend(self) -> None:
        known = self._known
        told = min(self._owner.base + self._made(), known + MAX_EXTEND)
        self._busy = True
        prompt, started = self._owner.prompt, self._events.now

        def done() -> None:
            self._events.after(self._round_trip / 2, back)

        def back() -> None:
            round_seconds = self._events.now - started
            self._quickest_round = min(self._quickest_round or round_seconds, round_seconds)
            seconds = max(0.0, round_seconds - self._round_trip)
            self._shared.state = observe_extend(self._shared.state, self._main.name, told - known, seconds)
            self._known, self._busy = told, False
            self._rounds += 1
            self.consider()

        forward = Forward(told - known, prompt + known, done, extend=True, reserve=prompt + told)
        self._events.after(self._round_trip / 2, lambda: self._owner.main_engine().forward(forward))

    def _stop_relay(self) -> None:
        assert self.engine is not None
        assert self.sequence is not None
        self._stopped_at, self._stopped = self.engine.stop(self.sequence), self._events.now

    def _switch(self) -> None:
        record, tokens = self._owner.record, self._owner.base + self._stopped_at
        self.over = True
        record.handoff_start = self._stopped
        record.handoff_index, record.rounds = tokens, self._rounds
        self._interval, self._held_tokens = self._shown_interval(), self._tokens_held()
        known = self._known
        self._events.after(self._round_trip / 2, lambda: self._owner.main_decodes(known, tokens))

    def _shown_interval(self) -> float:
        pace = self._shared.settings.pace if self._hold_back else 1.0
        return self._token_interval() * pace if self.engine is not None else 0.0

    def gap(self, pause: float) -> float:
        """The longest pause that the reader sees when main decode's first token comes `pause` after the switch."""
        return max(self._interval, pause / (self._held_tokens + 1))
