"""What happened to one simulated request."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

UNKNOWN = math.nan


class Record:
    """Times are in seconds of simulated time, nan for what did not happen; sizes in bytes."""

    __slots__ = (
        "arrival", "cached", "finished", "first_token", "handoff_done", "handoff_index", "handoff_start", "hit_rate",
        "kv_ready", "largest_gap", "main", "main_tokens", "number", "output", "pipeline", "preemptions", "prefill",
        "prefill_end", "prefill_start", "prefill_tokens", "prompt", "relay", "relay_start", "relay_tokens", "rescues",
        "rounds", "second_token", "session", "status", "transfer_queued", "transfer_start", "wan_bytes",
    )  # fmt: skip

    def __init__(self, number: int, arrival: float, prompt: int, output: int, session: str) -> None:
        self.number, self.arrival, self.prompt, self.output, self.session = number, arrival, prompt, output, session
        self.pipeline = self.prefill = self.main = ""
        self.relay: str | None = None
        self.hit_rate = 0.0
        self.cached = 0  # prompt tokens that prefill did not compute
        self.prefill_start = self.prefill_end = self.transfer_start = self.kv_ready = self.relay_start = UNKNOWN
        self.first_token = self.second_token = self.handoff_start = self.handoff_done = self.finished = UNKNOWN
        self.transfer_queued = 0.0
        self.wan_bytes = 0.0
        self.handoff_index = -1  # first index that main decode makes
        self.rounds = self.prefill_tokens = self.relay_tokens = self.main_tokens = self.preemptions = self.rescues = 0
        self.largest_gap = 0.0
        self.status = "running"  # then ok, failed or refused

    @property
    def ttft(self) -> float:
        """Time to the first token that the user sees."""
        return self.first_token - self.arrival

    @property
    def ttst(self) -> float:
        """Time to the second token."""
        return self.second_token - self.arrival

    @property
    def e2el(self) -> float:
        """Time to the last token."""
        return self.finished - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time of each token after the first; nan for one token."""
        return (self.finished - self.first_token) / (self.output - 1) if self.output > 1 else UNKNOWN

    @property
    def transfer(self) -> float:
        """Seconds on the line, without waiting for a connection."""
        return self.kv_ready - self.transfer_start

    def check(self) -> None:
        """INV-SIM-CAUSAL: no phase ends before the one that it needs; every request ends once with all its tokens."""
        moments = [
            self.arrival, self.prefill_start, self.prefill_end, self.first_token, self.second_token, self.finished,
        ]  # fmt: skip
        known = [moment for moment in moments if not math.isnan(moment)]
        assert all(a <= b + 1e-9 for a, b in pairwise(known)), f"INV-SIM-CAUSAL: {self.as_dict()}"
        if not self.rescues:
            assert not self.kv_ready < self.prefill_end - 1e-9, "INV-SIM-CAUSAL: KV arrives before it is computed"
        if self.status == "ok":
            made = self.prefill_tokens + self.relay_tokens + self.main_tokens
            assert made == self.output, f"INV-SIM-TOKENS: {made} of {self.output}: {self.as_dict()}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what did not happen is None."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields |= {"ttft": self.ttft, "ttst": self.ttst, "tpot": self.tpot, "e2el": self.e2el}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in fields.items()}
