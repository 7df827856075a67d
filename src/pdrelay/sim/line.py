"""A wide-area line that its transfers really share.

The line has a rate, a pool of connections and a cap for each connection. All transfers that are sending get the same
share, min(rate / sending, cap), so one number, the bytes that such a share has amounted to since the start (virtual
time), says where every transfer stands: a transfer that begins with b bytes left ends when virtual time has grown by b.
Nothing has to be done for the others when one comes or goes.

A transfer holds one connection while it has bytes to send; without a free one it waits. `fair` gives connections first
come, first served; `srpt` lets the transfers with the least left send and interrupts others for them, behind what those
have under way. A connection can suffer a loss episode, during which its transfer sends nothing; the line's rate can
vary and drop to nothing.

INV-SIM-LINE-1: what all transfers sent together is at most the integral of the line's rate.
INV-SIM-LINE-2: every transfer arrives with exactly the bytes that were given to it.
INV-SIM-LINE-3: no more connections are held than there are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from pdrelay.sim.events import Event, Events

Discipline = Literal["fair", "srpt"]


class LineSpec(NamedTuple):
    """A line from one cluster to another. Rates are in bytes/s, times in seconds."""

    rate: float
    rtt: float = 0.0
    connections: int = 64
    connection_rate: float = math.inf  # cap of one connection
    discipline: Discipline = "fair"
    under_way: float = 0.0  # srpt: what is so near its turn goes before a transfer that is more urgent
    setup: float = 0.0  # a transfer holds its connection so long before its first byte
    fluctuation: float = 0.0  # sigma of the lognormal factor on the rate, whose mean is 1
    fluctuates_every: float = 1.0  # a new factor is drawn
    loss_every: float = math.inf  # mean sending time of a connection between loss episodes
    loss_lasts: float = 0.0  # their mean length
    outages: tuple[tuple[float, float], ...] = ()  # from, to
    wire_ratio: float = 1.0  # bytes on the wire for each byte of KV, below 1 with a codec


class Transfer:
    """What goes across for one request. Bytes are given as they come to exist; `close` says that these were all."""

    __slots__ = (
        "arrived", "closed", "connected", "end", "given", "left", "loss", "on_arrival", "opened", "queued", "sending",
        "started", "waiting_since",
    )  # fmt: skip

    def __init__(self, opened: float, on_arrival: Callable[[Transfer], None]) -> None:
        self.opened, self.on_arrival = opened, on_arrival
        self.given = 0.0  # bytes
        self.left = 0.0  # bytes, while it does not send
        self.end = math.inf  # virtual time at which it has sent what it was given, while it sends
        self.sending = self.connected = self.closed = False
        self.waiting_since = math.inf  # for a connection
        self.queued = 0.0  # seconds that it waited for a connection
        self.started = math.inf
        self.arrived = math.inf
        self.loss: Event | None = None


class Line:
    """One direction between two clusters."""

    def __init__(self, events: Events, spec: LineSpec, seed: int = 0) -> None:
        self.spec = spec
        self._events, self._random = events, random.Random(seed)  # noqa: S311 - a simulation, no secret
        self._rate = spec.rate
        self._down = False
        self._virtual = 0.0
        self._since = 0.0
        self._sending = 0
        self._ends: list[tuple[float, int, Transfer]] = []
        self._number = 0
        self._waiting: deque[Transfer] = deque()
        self._next: Event | None = None
        self._varying: Event | None = None
        self.connected = 0
        self.sent = 0.0  # bytes
        self.given = 0.0  # bytes, sent or not
        self.could_send = 0.0  # bytes: the integral of the rate
        self.connection_seconds = 0.0
        self.transfers = 0  # that have arrived
        for start, end in spec.outages:
            events.at(start, lambda: self._set_down(True))
            events.at(end, lambda: self._set_down(False))

    @property
    def down(self) -> bool:
        """True during an outage."""
        return self._down

    @property
    def backlog(self) -> float:
        """Bytes that were given and have not been sent."""
        return max(0.0, self.given - self.sent)

    @property
    def queue(self) -> int:
        """Transfers that wait for a connection."""
        return len(self._waiting)

    def open(self, on_arrival: Callable[[Transfer], None]) -> Transfer:
        """A transfer without bytes yet; `on_arrival` is called when its last byte has arrived."""
        return Transfer(self._events.now, on_arrival)

    def give(self, transfer: Transfer, size: float) -> None:
        """`size` more bytes of KV can be sent."""
        assert not transfer.closed
        size *= self.spec.wire_ratio
        if size <= 0:
            return
        self._advance()
        transfer.given += size
        self.given += size
        if transfer.sending:
            transfer.end += size
            self._push(transfer)
        else:
            transfer.left += size
            if not transfer.connected and transfer.waiting_since == math.inf:
                self._want_connection(transfer)
        self._plan()

    def close(self, transfer: Transfer) -> None:
        """All bytes have been given."""
        transfer.closed = True
        self._advance()
        if not transfer.sending and not transfer.left:
            self._arrive(transfer)

    def settle(self) -> None:
        """Brings all counters up to now and checks them."""
        self._advance()
        assert self.sent <= self.could_send * (1 + 1e-9) + 1e-3, "INV-SIM-LINE-1"

    # ---- virtual time ----

    def _share(self) -> float:
        """Bytes/s of each sending transfer."""
        if self._down or not self._sending:
            return 0.0
        return min(self._rate / self._sending, self.spec.connection_rate)

    def _advance(self) -> None:
        now = self._events.now
        elapsed = now - self._since
        if elapsed <= 0:
            return
        grown = self._share() * elapsed
        self._virtual += grown
        self.sent += grown * self._sending
        self.could_send += 0.0 if self._down else self._rate * elapsed
        self.connection_seconds += self.connected * elapsed
        self._since = now

    def _plan(self) -> None:
        """Sets the event of the next transfer to have sent what it was given."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        ends = self._ends
        while ends and (not ends[0][2].sending or ends[0][2].end != ends[0][0]):
            heapq.heappop(ends)  # it stopped sending, or was given more
        share = self._share()
        if ends and share:
            self._next = self._events.after(max(0.0, ends[0][0] - self._virtual) / share, self._sent)
        if self._varying is None and self._sending and self.spec.fluctuation:
            self._varying = self._events.after(self.spec.fluctuates_every, self._vary)

    def _push(self, transfer: Transfer) -> None:
        self._number += 1
        heapq.heappush(self._ends, (transfer.end, self._number, transfer))

    def _sent(self) -> None:
        """The first transfer has sent what it was given."""
        self._next = None
        self._advance()
        end, _, transfer = heapq.heappop(self._ends)
        self._virtual = max(self._virtual, end)  # rounding must not leave a few bytes over
        self._stop(transfer)
        transfer.left = 0.0
        self._disconnect(transfer)
        if transfer.closed:
            self._arrive(transfer)
        self._plan()

    def _arrive(self, transfer: Transfer) -> None:
        assert not transfer.left, "INV-SIM-LINE-2"
        self.transfers += 1
        delay = self.spec.rtt / 2 if transfer.given else 0.0

        def arrived() -> None:
            transfer.arrived = self._events.now
            transfer.on_arrival(transfer)

        self._events.after(delay, arrived)

    # ---- connections ----

    def _slots(self) -> int:
        """Transfers that may hold a connection: srpt opens no more than fill the line."""
        if self.spec.discipline == "srpt" and self._rate:
            return min(self.spec.connections, math.ceil(self._rate / self.spec.connection_rate) or 1)
        return self.spec.connections

    def _want_connection(self, transfer: Transfer) -> None:
        transfer.waiting_since = self._events.now
        if self.connected < self._slots():
            self._connect(transfer)
            return
        self._waiting.append(transfer)
        if self.spec.discipline == "srpt":
            if self.spec.under_way:
                since = transfer.waiting_since
                self._events.after(self.spec.under_way, lambda: self._overtake_later(transfer, since))
            else:
                self._overtake(transfer)

    def _overtake_later(self, transfer: Transfer, since: float) -> None:
        if transfer.waiting_since == since:  # else it has had a connection meanwhile
            self._advance()
            self._overtake(transfer)
            self._plan()

    def _overtake(self, transfer: Transfer) -> None:
        """Lets a waiting transfer send in place of the one that has most left, if that is more."""
        longest = self._longest_sending()
        if longest is None or longest.end - self._virtual <= transfer.left:
            return
        self._stop(longest)
        self._disconnect(longest, pass_on=False)
        longest.waiting_since = self._events.now
        self._waiting.remove(transfer)
        self._waiting.append(longest)
        self._connect(transfer)

    def _longest_sending(self) -> Transfer | None:
        live = [entry for entry in self._ends if entry[2].sending and entry[2].end == entry[0]]
        return max(live)[2] if live else None

    def _connect(self, transfer: Transfer) -> None:
        now = self._events.now
        transfer.queued += now - transfer.waiting_since
        transfer.waiting_since = math.inf
        transfer.started = min(transfer.started, now)
        transfer.connected = True
        self.connected += 1
        assert self.connected <= self.spec.connections, "INV-SIM-LINE-3"
        if self.spec.setup and transfer.started == now:
            self._events.after(self.spec.setup, lambda: self._resume(transfer))
        else:
            self._begin(transfer)

    def _resume(self, transfer: Transfer) -> None:
        self._advance()
        self._begin(transfer)
        self._plan()

    def _begin(self, transfer: Transfer) -> None:
        transfer.sending = True
        transfer.end = self._virtual + transfer.left
        transfer.left = 0.0
        self._sending += 1
        self._push(transfer)
        if self.spec.loss_lasts:
            gap = self._random.expovariate(1 / self.spec.loss_every)
            transfer.loss = self._events.after(gap, lambda: self._lose(transfer))

    def _stop(self, transfer: Transfer) -> None:
        """It sends nothing from now on; what is left of it is kept."""
        transfer.sending = False
        transfer.left = max(0.0, transfer.end - self._virtual)
        self._sending -= 1
        if transfer.loss is not None:
            transfer.loss.cancel()
            transfer.loss = None

    def _disconnect(self, transfer: Transfer, *, pass_on: bool = True) -> None:
        transfer.connected = False
        self.connected -= 1
        if pass_on and self._waiting and self.connected < self._slots():
            self._connect(self._pick())

    def _pick(self) -> Transfer:
        if self.spec.discipline == "srpt":
            least = min(self._waiting, key=lambda waiting: waiting.left)
            self._waiting.remove(least)
            return least
        return self._waiting.popleft()

    # ---- what goes wrong ----

    def _lose(self, transfer: Transfer) -> None:
        """Its connection loses packets and waits out its retransmission timers."""
        self._advance()
        transfer.loss = None
        self._stop(transfer)
        self._events.after(self._random.expovariate(1 / self.spec.loss_lasts), lambda: self._resume(transfer))
        self._plan()

    def _vary(self) -> None:
        self._advance()
        self._varying = None
        sigma = self.spec.fluctuation
        self._rate = self.spec.rate * self._random.lognormvariate(-(sigma**2) / 2, sigma)
        self._plan()

    def _set_down(self, down: bool) -> None:
        self._advance()
        self._down = down
        self._plan()
