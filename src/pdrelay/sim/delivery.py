"""KV on its way to one addressee: fed as it is computed, with what the addressee lacks only."""

from __future__ import annotations

from collections.abc import Callable

from pdrelay.perf.instance import InstanceProfile
from pdrelay.sim.events import Events
from pdrelay.sim.line import Line, Transfer
from pdrelay.sim.parts import Depot


class Delivery:
    """From prefill's depot to another engine's. Without a line it arrives as soon as it is whole."""

    __slots__ = (
        "_bytes_per_token",
        "_closed",
        "_events",
        "_fed",
        "_fixed",
        "_have",
        "_line",
        "_on_arrival",
        "_opened",
        "_page",
        "_ready",
        "_wanted",
        "arrived",
        "transfer",
        "whole",
    )  # fmt: skip

    def __init__(
        self, events: Events, line: Line | None, have: int, profile: InstanceProfile,
        on_arrival: Callable[[Delivery], None],
    ) -> None:  # fmt: skip
        """`have`: leading tokens that the addressee holds. `profile`: of the engine that computes the KV."""
        self._events, self._line, self._on_arrival = events, line, on_arrival
        self._page, self._bytes_per_token, self._fixed = profile.page_tokens, profile.kv_per_token, profile.kv_fixed
        self._have = self._fed = self._ready = have - have % self._page
        self.whole = self._opened = self._closed = self.arrived = False
        self._wanted = 0.0  # when it is known here what the addressee lacks
        self.transfer: Transfer | None = None

    def open(self) -> None:
        """The addressee has room: what is ready may go, over a line once the offer has been answered."""
        self._opened = True
        if self._line is not None:
            self._wanted = self._events.now + self._line.spec.rtt
            self.transfer = self._line.open(lambda _: self._arrive())
        self._send()

    def feed(self, tokens: int) -> None:
        """The first `tokens` tokens are computed."""
        if (whole := tokens - tokens % self._page) > self._ready:
            self._ready = whole
            if self._opened:
                self._send()

    def finish(self, tokens: int) -> None:
        """All `tokens` tokens are computed."""
        self._ready = max(self._ready, self._paged(tokens))
        self.whole = True
        if self._opened:
            self._send()

    def size(self, tokens: int) -> float:
        """Bytes of KV that the addressee lacks of a prompt of `tokens` tokens, when they cross a line."""
        lacking = self._paged(tokens) - self._have
        return lacking * self._bytes_per_token + self._fixed if lacking > 0 and self._line is not None else 0.0

    def _paged(self, tokens: int) -> int:
        """Tokens of all pages of a prompt: the last page goes whole."""
        return tokens + -tokens % self._page

    def _send(self) -> None:
        if self._closed:
            return
        if self._line is None or self.transfer is None:
            if self.whole:
                self._arrive()
            return
        size = (self._ready - self._fed) * self._bytes_per_token
        if self.whole and self._ready > self._have:
            size += self._fixed
        if size and self._events.now < self._wanted:
            self._events.at(self._wanted, self._send)
            return
        self._fed = self._ready
        self._line.give(self.transfer, size)
        if self.whole:
            self._closed = True
            self._line.close(self.transfer)

    def _arrive(self) -> None:
        self.arrived = True
        self._on_arrival(self)


class Pins:
    """What one leg of a request has pinned in depots; given back once, when main decode has the pages."""

    __slots__ = ("_released", "_taken")

    def __init__(self) -> None:
        self._taken: list[tuple[Depot, float]] = []
        self._released = False

    def take(self, depot: Depot | None, size: float, then: Callable[[], None]) -> None:
        """Pins `size` bytes, then calls `then`."""
        if depot is None:
            then()
            return

        def pinned() -> None:
            if self._released:
                depot.unpin(size)
            else:
                self._taken.append((depot, size))
                then()

        depot.pin(size, pinned)

    def release(self) -> None:
        """Gives everything back."""
        self._released = True
        taken, self._taken = self._taken, []
        for depot, size in taken:
            depot.unpin(size)
