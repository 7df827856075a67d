"""The trace of one running request, written as things happen."""

from __future__ import annotations

import time

from pdrelay.depot.base import TransferStats
from pdrelay.engine.messages import Opened
from pdrelay.gateway.base import GenerationRequest, Tier, TokenBatch, Trace
from pdrelay.gateway.handoff import Handoff
from pdrelay.gateway.splice import Splice
from pdrelay.policy.base import Placement


class Record:
    """Keeps the request's clock: seconds since its arrival."""

    def __init__(self, request: GenerationRequest, placement: Placement) -> None:
        self._arrival = request.arrival
        self.trace = Trace(
            pipeline=placement.pipeline.value,
            prefill_instance=placement.prefill,
            relay_instance=placement.relay,
            main_instance=placement.main,
            hit_rate=placement.hit_rate,
            prompt_tokens=len(request.prompt),
        )

    def now(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._arrival

    @property
    def handing_over(self) -> bool:
        """Main decode was told to take over, and its first token has not come."""
        return self.trace.handoff_start is not None and self.trace.handoff_done is None

    def hit(self, cached_tokens: int) -> None:
        """Prefill found so many tokens of the prompt. A repeated one finds what the first left, and does not count."""
        if self.trace.prefill_hit_rate is None:
            self.trace.prefill_hit_rate = cached_tokens / self.trace.prompt_tokens

    def main_opened(self, event: Opened) -> None:
        """Main decode has computed the prompt."""
        if self.trace.kv_ready is None:
            self.trace.kv_ready = self.now() - (event.ready - event.pages_ready)

    def handed_off(self, index: int, handoff: Handoff, held_back: int) -> None:
        """Main decode was told to take over from token `index` on, while `held_back` tokens were not shown yet."""
        trace = self.trace
        trace.handoff_index, trace.handoff_start, trace.held_back = index, self.now(), held_back
        trace.handoff_mode, trace.handoff_rounds = handoff.mode, len(handoff.extends)

    def taken_over(self, handoff: Handoff) -> None:
        """Main decode's first token came."""
        trace = self.trace
        trace.handoff_done = self.now()
        trace.handoff_extends, trace.relay_extra_tokens = handoff.extends, handoff.extra_tokens

    def shown(self, batch: TokenBatch) -> None:
        """The client is given `batch`."""
        if batch.index == 0:
            self.trace.first_token = self.now()
        if batch.index <= 1 < batch.index + len(batch.ids):
            self.trace.second_token = self.now()

    def complete(self, splice: Splice, stats: TransferStats) -> Trace:
        """The trace with what others count."""
        trace = self.trace
        trace.wan_bytes, trace.wan_bytes_saved = stats.wire, stats.saved
        trace.prefill_tokens, trace.relay_tokens, trace.main_tokens = map(splice.made_by, Tier)
        trace.token_ids = list(splice.tokens)
        return trace
