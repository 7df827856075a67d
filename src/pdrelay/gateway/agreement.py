"""Whether main decode would have said what was said before it took over.

Every session that is opened or extended on main decode comes with its own next token, which is never shown. Where two
engines with the same KV choose the same token, that is for greedy and for seeded requests, it must be the token that
prefill or the relay makes at that place. A wrong KV page, or weights that differ, show here first. Rounding makes good
engines disagree now and then, so it is the rate that raises an alarm, for each pair of engines.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge

from pdrelay.gateway.splice import Splice

log = logging.getLogger(__name__)

WINDOW = 256
"""Comparisons of a pair of which the rate is taken."""

LEAST = 16
"""Comparisons before which no alarm is raised."""

SAMPLED = 8
"""Of so many requests without a relay one is compared; of those with a relay all are, since they cost nothing."""

MARGIN = 0.05
"""An alarm ends when the rate is so much above the threshold, or half-way to 1 if that is less."""


class Pair(NamedTuple):
    """Who made a token, and who was asked what it would have said."""

    source: str
    main: str


class AgreementMonitor:
    """Rates and alarms of all pairs of one gateway."""

    def __init__(self, threshold: float, registry: CollectorRegistry | None = None) -> None:
        """An alarm is raised when the rate of a pair falls below `threshold`; 0 raises none."""
        registry = registry or CollectorRegistry()
        self._threshold = threshold
        self._windows: dict[Pair, deque[bool]] = {}
        self._alarms: dict[Pair, bool] = {}
        self._direct: Counter[str] = Counter()  # requests that went to a main decode instance without a relay
        labels = list(Pair._fields)
        self._total = prometheus_client.Counter(
            "pdrelay_agreement",
            "Tokens made before a handoff, by whether main decode would have chosen them; greedy and seeded requests",
            [*labels, "result"],
            registry=registry,
        )
        self._rate = Gauge(
            "pdrelay_agreement_rate", f"Share of the last {WINDOW} that agreed", labels, registry=registry
        )
        self._alarm = Gauge("pdrelay_agreement_alarm", "1 while that is too low", labels, registry=registry)

    def compare(self, pair: Pair, made: int, predicted: int) -> None:
        """Takes in one comparison."""
        window = self._windows.get(pair)
        if window is None:
            window = self._windows[pair] = deque(maxlen=WINDOW)
            self._rate.labels(*pair).set_function(lambda: self.rate(pair))
        window.append(made == predicted)
        self._total.labels(*pair, "agree" if made == predicted else "disagree").inc()
        self._judge(pair)

    def wants(self, main: str) -> bool:
        """Whether a request that goes to `main` directly is to be compared: one in `SAMPLED`, for it costs a step."""
        self._direct[main] += 1
        return self._direct[main] % SAMPLED == 1

    def rate(self, pair: Pair) -> float:
        """Share of the latest comparisons that agreed. There must be one."""
        window = self._windows[pair]
        return sum(window) / len(window)

    def alarm(self, main: str) -> str:
        """What is wrong with main decode instance `main`; empty when nothing is."""
        return "; ".join(
            f"it agrees with {pair.source} on {self.rate(pair):.0%} of {len(self._windows[pair])} tokens"
            for pair, raised in self._alarms.items()
            if raised and pair.main == main
        )

    def _judge(self, pair: Pair) -> None:
        raised, rate = self._alarms.get(pair, False), self.rate(pair)
        limit = min(self._threshold + MARGIN, (1 + self._threshold) / 2) if raised else self._threshold
        now = rate < limit and len(self._windows[pair]) >= LEAST
        if now == raised:
            return
        self._alarms[pair] = now
        self._alarm.labels(*pair).set(now)
        if now:
            log.error(
                "main decode %s agrees with %s on %.0f %% of tokens only: a KV page or the weights may be wrong",
                pair.main, pair.source, 100 * rate,
            )  # fmt: skip
        else:
            log.warning("main decode %s agrees with %s again", pair.main, pair.source)


class Predictions:
    """The comparisons of one request, in whatever order tokens and predictions come."""

    def __init__(self, monitor: AgreementMonitor, splice: Splice, *, comparable: bool) -> None:
        """Of the output `splice`. Nothing is compared unless `comparable`: two engines must choose alike."""
        self._monitor, self._splice, self._comparable = monitor, splice, comparable
        self._waiting: dict[int, tuple[str, int]] = {}  # main instance and prediction, by index

    @property
    def waiting(self) -> bool:
        """Whether a prediction waits for its token."""
        return bool(self._waiting)

    def made(self) -> None:
        """Tokens came."""
        if self._waiting:
            for index in [index for index in self._waiting if index < len(self._splice.tokens)]:
                self._compare(index, *self._waiting.pop(index))

    def predicted(self, index: int, token: int | None, main: str) -> None:
        """`main` would have said `token` at `index`."""
        if not self._comparable or token is None:
            return
        if index < len(self._splice.tokens):
            self._compare(index, main, token)
        else:
            self._waiting[index] = main, token

    def _compare(self, index: int, main: str, token: int) -> None:
        source = self._splice.maker_of(index)
        if source != main:
            self._monitor.compare(Pair(source, main), self._splice.tokens[index], token)
