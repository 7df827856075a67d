"""The life of one simulated request: prefill, deliveries, relay, main decode, and what happens when a part fails.

It follows `gateway/request.py`: the same phases in the same order, with callbacks in place of tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

from pdrelay.errors import PlacementError
from pdrelay.sim.delivery import Delivery, Pins
from pdrelay.sim.engine import Engine
from pdrelay.sim.parts import Instance
from pdrelay.sim.record import Record
from pdrelay.sim.relaying import Relaying
from pdrelay.sim.work import Forward, Sequence
from pdrelay.sim.world import World
from pdrelay.workload.base import Request

MAX_RESCUES = 3


class Life:
    """One request, from arrival to its last token."""

    __slots__ = (
        "_assigned", "_backlog", "_complete", "_deliveries", "_epoch", "_forward", "_main_rank", "_pins", "_placement",
        "_relay_noted", "_rescuer", "_sequence", "_world", "base", "done", "main", "output", "prefill", "prompt",
        "record", "relay", "relaying", "request",
    )  # fmt: skip

    def __init__(self, world: World[Life], number: int, request: Request, arrival: float) -> None:
        self._world, self.request = world, request
        self.record = Record(number, arrival, request.prompt, request.output, request.session)
        self.prompt, self.output = request.prompt, request.output  # of the leg under way
        self.base = 1 if world.token_zero else 0
        self.done = self._complete = False  # complete: its last token is on the way to the reader
        self._epoch = 0
        self._assigned: Instance | None = None
        self._backlog = 0  # prompt tokens that its prefill instance is still to compute
        self._clear()

    def _clear(self) -> None:
        self._deliveries: list[Delivery] = []
        self._forward: Forward | None = None
        self._sequence: Sequence | None = None
        self._main_rank: Engine | None = None
        self._pins = Pins()
        self._relay_noted = False
        self._rescuer: Instance | None = None
        self.relaying: Relaying | None = None
        self.relay: Instance | None = None

    # ---- placement and prefill ----

    def start(self) -> None:
        """Places the request and sets everything going."""
        world, record = self._world, self.record
        try:
            placement, held = world.place(self.request._replace(prompt=self.prompt))
        except PlacementError:
            self._end("failed" if self._epoch else "refused")
            return
        self._placement = placement
        self.prefill, self.main = world.instance(placement.prefill), world.instance(placement.main)
        self.relay = world.instance(placement.relay) if placement.relay else None
        self._assigned = self.main
        self.main.assigned += 1
        record.pipeline, record.prefill, record.main = placement.pipeline.value, placement.prefill, placement.main
        record.relay, record.hit_rate = placement.relay, placement.hit_rate
        if not self._fits():
            self._end("refused")
            return
        cached = min(held[placement.cache_from or placement.prefill], self.prompt - 1)
        record.cached = max(record.cached, cached)
        self._backlog = self.prompt - cached
        self.prefill.backlog += self._backlog
        self._open_deliveries(held, cached)
        size = self.prefill.profile.kv_bytes(self.prompt)
        prefill = self._still(lambda: self._prefill(cached))
        if placement.cache_from:
            prefill = self._fetched(world.instance(placement.cache_from), held[placement.prefill], cached, prefill)
        self._pins.take(self.prefill.depot, size, prefill)

    def _fetched(self, source: Instance, have: int, tokens: int, then: Callable[[], None]) -> Callable[[], None]:
        """`then`, once the prefix that `source` holds is here: the first `tokens` tokens, of which `have` are."""
        world, profile = self._world, self.prefill.profile
        line = world.line(source.cluster, self.prefill.cluster)

        def fetch() -> None:
            delivery = Delivery(world.events, line, have, profile, lambda _: then())
            delivery.open()
            delivery.finish(tokens)
            self.record.wan_bytes += delivery.size(tokens)

        return fetch

    def _fits(self) -> bool:
        """False for what no waiting helps: an empty engine or depot would be too small."""
        tokens, size = self.prompt + self.output, self.prefill.profile.kv_bytes(self.prompt)
        instances = [self.prefill, self.main, *([self.relay] if self.relay is not None else [])]
        return all(
            instance.engines[0].fits(tokens) and (instance.depot is None or size <= instance.depot.capacity)
            for instance in instances
        )

    def _prefill(self, cached: int) -> None:
        if self.prefill.down:  # it died while the request waited for room in the depot
            self.lost(self.prefill)
            return
        forward = Forward(
            self.prompt - cached, cached, self._still(self._prefilled), reserve=self.prompt,
            on_chunk=self._still_chunks(cached) if self._world.overlap else None,
        )  # fmt: skip
        self._forward = forward
        self.prefill.rank().forward(forward)

    def _still_chunks(self, cached: int) -> Callable[[int], None]:
        deliveries, early, before = self._deliveries, 1 - 1 / self._world.slices, 0
        for delivery in deliveries:
            delivery.feed(cached)

        def chunk(done: int) -> None:
            nonlocal before
            sent, before = before + int((done - before) * early), done
            for delivery in deliveries:
                delivery.feed(cached + sent)

        return chunk

    def _open_deliveries(self, held: dict[str, int], cached: int) -> None:
        world, profile, placement = self._world, self.prefill.profile, self._placement
        if self.relay is not None:
            line = world.line(self.prefill.cluster, self.relay.cluster)
            have = held.get(self.relay.name, 0)
            at_relay = self._still_delivery(self._relay_has_pages)
            to_relay = Delivery(world.events, line, have, profile, at_relay)
            self._deliveries.append(to_relay)
            to_relay.open()
        line = world.line(self.prefill.cluster, self.main.cluster)
        have = min(held[placement.main], self.prompt)
        main, pins, request = self.main, self._pins, self.request

        def arrived(delivery: Delivery) -> None:
            """Also when the request has ended on the relay: the next turn finds its prefix here."""
            pins.release()
            main.store(request.blocks, request.block_tokens)
            if not self.done and delivery in self._deliveries:
                self._main_has_pages(delivery)

        to_main = Delivery(world.events, line, have, profile, arrived)
        self._deliveries.append(to_main)
        if main.depot is self.prefill.depot:
            to_main.open()
        else:
            pins.take(main.depot, profile.kv_bytes(self.prompt), to_main.open)

    def _prefilled(self) -> None:
        world, record, now = self._world, self.record, self._world.events.now
        assert self._forward is not None
        if isnan(record.prefill_end):
            record.prefill_start, record.prefill_end = self._forward.started, now
            if world.token_zero:
                record.first_token = now
        record.prefill_tokens += self.base
        self._leave_prefill()
        self.prefill.store(self.request.blocks, self.request.block_tokens)
        ended = self.output <= self.base
        if self.relay is not None and not ended and not self.relay.down:
            round_trip = self._round_trip()
            self.relaying = Relaying(world.events, world.handoffs, self, self.relay, self.main, round_trip)
        record.wan_bytes += self._deliveries[-1].size(self.prompt)
        for delivery in self._deliveries:
            delivery.finish(self.prompt)
        if ended:
            self._end("ok")

    def _round_trip(self) -> float:
        line = self._world.line(self.prefill.cluster, self.main.cluster)
        return line.spec.rtt if line is not None else 0.0

    # ---- pages arrive ----

    def _relay_has_pages(self, delivery: Delivery) -> None:
        del delivery
        if self.relay is None or self.relaying is None or self.relaying.stopped:
            return
        self.relay.store(self.request.blocks, self.request.block_tokens)
        self.record.relay_start = self._world.events.now
        self.relaying.start(self.output - self.base, self._still(self._relay_ended))

    def _main_has_pages(self, delivery: Delivery) -> None:
        record, now = self.record, self._world.events.now
        record.kv_ready = now
        if delivery.transfer is not None:
            record.transfer_start = min(delivery.transfer.started, now)
            record.transfer_queued = delivery.transfer.queued
        if self.output <= self.base:
            return  # it has ended with prefill, or is about to
        if self.relaying is None:
            self.main_decodes(self.base, self.base)
        else:
            self._world.events.after(self._round_trip() / 2, self._still(self.relaying.ready))

    # ---- decode ----

    def main_engine(self) -> Engine:
        """The rank of main decode that the request is on."""
        if self._main_rank is None:
            self._main_rank = self.main.rank()
        return self._main_rank

    def main_decodes(self, known: int, tokens: int) -> None:
        """Main decode goes on after `tokens` output tokens, of which it has computed `known`."""
        if self.done or self.main.down:
            return
        self._note_relay()
        if tokens - known <= 1:
            self._decode(self.prompt + tokens, self.output - tokens)
            return

        def extended() -> None:
            self.record.main_tokens += 1  # the forward that computes them samples the next one
            self.record.handoff_done = self._world.events.now + self._way_back()
            if self.output - tokens > 1:
                self._decode(self.prompt + tokens + 1, self.output - tokens - 1)
            else:
                self._end_after(self._way_back())

        forward = Forward(
            tokens - known, self.prompt + known, self._still(extended), extend=True, reserve=self.prompt + tokens
        )
        self.main_engine().forward(forward)

    def _decode(self, context: int, remaining: int) -> None:
        self._sequence = Sequence(context, remaining, self._still(self._main_ended))
        self.main_engine().decode(self._sequence)

    def _way_back(self) -> float:
        """Seconds until the gateway, beside prefill, has what main decode has made."""
        return self._round_trip() / 2 if self._rescuer is None else 0.0

    def _main_ended(self) -> None:
        self._note_main()
        self._end_after(self._way_back())

    def _end_after(self, seconds: float) -> None:
        """The last token is made; the reader has it `seconds` later, whatever dies meanwhile."""
        if seconds:
            self._complete = True
            self._world.events.after(seconds, self._still(lambda: self._end("ok")))
        else:
            self._end("ok")

    def _relay_ended(self) -> None:
        assert self.relaying is not None
        self.relaying.end()
        self._note_relay()
        self._end("ok")

    def _note_relay(self) -> None:
        """Takes down what the relay has made."""
        if self.relaying is None or self.relaying.sequence is None or self._relay_noted:
            return
        self._relay_noted = True
        record, sequence, made = self.record, self.relaying.sequence, self.relaying.made
        record.relay_tokens += made
        if made:
            self._first_decoded(sequence)
        record.preemptions += sequence.preemptions

    def _note_main(self) -> None:
        """Takes down what main decode has made."""
        sequence, record = self._sequence, self.record
        assert sequence is not None
        made = self.main_engine().made(sequence)
        if self._rescuer is None:
            record.main_tokens += made
        else:
            record.relay_tokens += made
        record.preemptions += sequence.preemptions
        if made:
            if not isnan(record.handoff_start) and isnan(record.handoff_done):
                record.handoff_done = sequence.first_token + self._way_back()
            self._first_decoded(sequence, self._way_back())
        if self.relaying is not None and not isnan(record.handoff_done):
            pause = record.handoff_done - record.handoff_start
            record.largest_gap = max(record.largest_gap, self.relaying.gap(pause))

    def _first_decoded(self, sequence: Sequence, way: float = 0.0) -> None:
        record, moment = self.record, sequence.first_token + way
        record.largest_gap = max(record.largest_gap, sequence.largest_gap)
        if self._world.token_zero:
            if isnan(record.second_token):
                record.second_token = moment
        elif isnan(record.first_token):
            record.first_token = moment

    # ---- failures ----

    def lost(self, instance: Instance) -> None:
        """`instance` is about to die with what it holds of this request."""
        if self.done or self._complete:
            return
        if instance is self.prefill and not self._prefill_ended():
            if self.record.prefill_tokens:
                self._rescue()
            else:
                self._end("failed")  # as the gateway does before token 0
        elif instance is self.relay and self.relaying is not None and not self.relaying.over:
            if self.relaying.alone:
                self._rescue()
            else:
                self.relaying.relay_lost()
        elif instance is self._rescuer:
            self._rescue()
        elif instance is self.main and self._rescuer is None:
            relaying = self.relaying
            if relaying is not None and not relaying.over and not relaying.stopped:
                relaying.alone = True
            else:
                self._rescue()

    def _prefill_ended(self) -> bool:
        return not self._deliveries or self._deliveries[-1].whole

    def _rescue(self) -> None:
        """Goes on elsewhere from the token ids that the user has."""
        record = self.record
        if self._sequence is not None:
            self._note_main()
        if self.relaying is not None:
            self.relaying.end()
        self._note_relay()
        made = record.prefill_tokens + record.relay_tokens + record.main_tokens
        self._epoch += 1
        record.rescues += 1
        self._drop_pins()
        self._unassign()
        self._clear()
        if record.rescues > MAX_RESCUES or made >= record.output:
            self._end("failed")
            return
        self.prompt, self.output = record.prompt + made, record.output - made
        self._world.events.after(0.0, self._still(self._go_on))

    def _go_on(self) -> None:
        """A relay has the prompt in its depot and computes what the user has; without one the policy places anew."""
        record = self.record
        relay = self._world.spare_relay(self.prefill.cluster)
        made = self.prompt - record.prompt
        if relay is None or not made:
            self.start()
            return
        self._rescuer = relay
        engine = self._main_rank = relay.rank()
        decode = self._still(lambda: self._decode(self.prompt, self.output))
        engine.forward(Forward(made, record.prompt, decode, extend=True, reserve=self.prompt))

    # ---- the end ----

    def _end(self, status: str) -> None:
        assert not self.done, "INV-SIM-END: a request ends once"
        self._drop_pins()
        self._unassign()
        self.done = True
        self.record.status = status
        self.record.finished = self._world.events.now
        if status == "ok":
            self.record.check()
        self._world.ended(self)

    def _leave_prefill(self) -> None:
        self.prefill.backlog -= self._backlog
        self._backlog = 0

    def _unassign(self) -> None:
        if self._backlog:
            self._leave_prefill()
        if self._assigned is not None:
            self._assigned.assigned -= 1
            self._assigned = None

    def _drop_pins(self) -> None:
        """What is still to be computed will never arrive; what is computed is on its way and is unpinned there."""
        if not self._prefill_ended():
            self._pins.release()

    def _still(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action`, unless the request has ended or gone elsewhere by then."""
        epoch = self._epoch

        def run() -> None:
            if not self.done and epoch == self._epoch:
                action()

        return run

    def _still_delivery(self, action: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        epoch = self._epoch

        def run(delivery: Delivery) -> None:
            if not self.done and epoch == self._epoch:
                action(delivery)

        return run
