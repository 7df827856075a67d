"""The life of one request: its legs, its transfer, the handoff, and what happens when a part fails.

Three sessions are opened at once: prefill; the relay's, which waits for pages at the near depot; main decode's, which
waits for them at the far one. `_advance` looks at what is known and does what can be done next; it runs after every
event, so the order in which events come does not matter. Events are taken in where they come, in the callback of their
connection; who iterates wakes only for tokens to show.

One module, long as it is, for one state machine: each event may concern every leg, the transfer and the handoff.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count

from pdrelay.engine.logprobs import Logprobs
from pdrelay.engine.messages import Extended, Failed, Finished, Open, Opened, Tokens
from pdrelay.errors import EngineRejectedError, EngineUnavailableError
from pdrelay.gateway.agreement import Predictions
from pdrelay.gateway.base import Finish, GenerationRequest, Sink, Tier, TokenBatch, Trace
from pdrelay.gateway.handoff import Handoff, Terms
from pdrelay.gateway.legs import Item, Leg, Lost, Notice, Untold
from pdrelay.gateway.outlet import Outlet
from pdrelay.gateway.pacing import Pacer
from pdrelay.gateway.places import Places
from pdrelay.gateway.record import Record
from pdrelay.gateway.route import Route
from pdrelay.gateway.splice import Splice
from pdrelay.gateway.transfer import PageTransfer
from pdrelay.kv.demand import Demand
from pdrelay.policy.base import Pipeline
from pdrelay.policy.handoff import MAX_EXTEND, Action

MAX_RESCUES = 3

REVIEW_SECONDS = 0.25
"""A handoff that could happen is looked at so often without an event: the relay may be silent."""

MAIN_RETRY_SECONDS = 1.0
"""A relay that decodes alone, because main decode or the line failed, looks for main decode so often."""


class RequestRun:
    """One running request; a TokenStream."""

    def __init__(
        self, request: GenerationRequest, pages: Demand, route: Route, places: Places, on_close: Callable[[], None]
    ) -> None:
        self.request, self.route = request, route
        self._places = places
        self.finish: Finish | None = None
        self._pages, self._on_close = pages, on_close
        self._splice = Splice()
        self._inbox: deque[Item | None] = deque()  # None: time to look again
        self._busy = True  # with an event, or not begun: what comes waits in the inbox
        self._outlet = Outlet()
        self._review: asyncio.TimerHandle | None = None
        self._prefill: Leg | None = None
        self._relay: Leg | None = None
        self._main: Leg | None = None
        self._handed_off = False
        self._pacer = Pacer()
        self._handoff = Handoff(route.handoffs, Terms.of(request, route.round_trip), self._splice, self._pacer)
        self._ending: Leg | None = None  # it delivered the last token, its Finished follows
        self._predictions = Predictions(route.agreement, self._splice, comparable=request.sampling.repeatable)
        self.cached_tokens = 0
        self.prompt_logprobs: Logprobs | None = None
        self._numbers = count()  # sessions; a sid is never used twice
        self._rescues = 0
        self._main_again = 0.0  # when a relay that decodes alone next looks for main decode
        self._pages_lost = False  # while prefill runs: then it must run again
        self._transfer = PageTransfer(route, pages, request.request_id)
        self._closed = False
        self._sink: Sink | None = None
        self._alone: Leg | None = None  # nothing waits for the iteration, and tokens of this leg change nothing
        self._record = Record(request, route.placement)
        self._now = self._record.now

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        self._start()
        self._work()
        while True:
            if not self._outlet.ready:
                self._rest()
                await self._outlet.wait()
            if (batch := self._outlet.take()) is None:
                break
            yield batch
        self._record.trace.finished = self._now()

    def _put(self, item: Item | None) -> None:
        self._alone = None
        self._inbox.append(item)
        if not self._busy and not self._closed:
            self._work()

    def _work(self) -> None:
        """Takes in what came, until the end."""
        self._busy = True
        try:
            while self._inbox and not self._outlet.closed:
                self._handle(self._inbox.popleft())
        except Exception as error:  # the request's alone: whoever brought the event must go on
            self._outlet.fail(error)
        finally:
            self._busy = False
        if self._outlet.awaited:
            self._rest()

    def _handle(self, item: Item | None) -> None:
        if item is not None and (batch := self._take(item)) is not None:
            self._arrived(batch)
            self._pacer.put(batch)
            if batch.index == 0:
                self._show()  # at once: the user waits for it, and what follows from it takes its time
        self._advance()
        if self.finish is not None:
            self._pacer.release()
        self._show()
        if self.finish is not None:
            self._outlet.end()

    def _show(self) -> None:
        while (shown := self._pacer.take(self._now())) is not None:
            self._record.shown(shown)
            self._outlet.put(shown)

    def _rest(self) -> None:
        """Who iterates has all there is: until the next event, or until it is time to look again without one."""
        if self._review is not None:
            self._review.cancel()
            self._review = None
        due = self._pacer.due
        if due is not None or (self._relay is not None and self._main_is_ready()):
            wait = REVIEW_SECONDS if due is None else min(max(due - self._now(), 0.0), REVIEW_SECONDS)
            self._review = asyncio.get_running_loop().call_later(wait, self._put, None)
        elif self._sink is not None:
            self._alone = self._decodes_alone()

    def divert(self, sink: Sink) -> None:
        """See TokenStream."""
        self._sink = sink

    def _decodes_alone(self) -> Leg | None:
        """The leg whose further tokens decide nothing: main decode's at last, a relay's before main decode is ready."""
        record, leg = self._record, self._relay or self._main
        if leg is None or self._prefill is not None or self._predictions.waiting or record.trace.second_token is None:
            return None
        if not leg.streaming or self._splice.maker != leg.instance:
            return None
        if leg is self._relay:
            return leg if self._main is not None and not self._main.opened else None
        return leg if leg.opened and not self._transfer.open and not record.handing_over else None

    def _relay_shortcut(self, event: Tokens) -> bool:
        """As `_shortcut`, while the relay may go on whatever it makes."""
        if self._alone is not self._relay or not self._handoff.stays() or not self._shortcut(event):
            return False
        self._handoff.relay_decoded(self._now())
        return True

    def _shortcut(self, event: Tokens) -> bool:
        """Gives tokens of the leg that decodes alone to the sink, past all queues. A `Tap`."""
        tokens, sink = self._splice.tokens, self._sink
        if self._alone is None or event.last or event.index != len(tokens) or event.logprobs is not None:
            return False
        assert sink is not None
        try:
            if not sink.take(event.index, event.ids):
                return False
        except Exception as error:  # it would end the engine's connection: the request alone must fail
            self._put(error)
        tokens += event.ids  # their maker is the one of those before
        return True

    def notify(self, notice: Notice) -> None:
        """Tells the request of something outside its legs."""
        self._put(notice)

    async def trace(self) -> Trace:
        """What happened so far."""
        return self._record.complete(self._splice, await self._transfer.stats())

    async def aclose(self, *, complete: bool = False) -> None:
        """Ends every leg and lease. What a relay finished alone still lands its pages at main decode."""
        if self._closed:
            return
        self._closed = True
        if self._review is not None:
            self._review.cancel()
        self._places.leave_all()
        self._on_close()
        ended = self.finish is not None or (complete and self._prefill is None)
        for leg in (self._prefill, self._relay, self._main, self._ending):
            if leg is not None:
                leg.close()
        self._transfer.end(keep_sending=ended and not self._main_is_ready())
        await self._transfer.ended()

    # ---- start ----

    def _start(self) -> None:
        self._prefill = Leg(Tier.PREFILL, self.route.prefill, self._open(Tier.PREFILL), self._put)
        self._transfer.start(lambda message: self._put(Untold(message)))
        if self.route.placement.pipeline is Pipeline.P_RLD_MD:
            with suppress(EngineUnavailableError):  # it went down since the request was placed
                self._open_relay(self._pages.names)
        if self._relay is None:
            self._open_main(self._pages.names)
        else:
            self._open_main_beside_relay()

    def _open_main(self, await_names: tuple[bytes, ...]) -> None:
        # Without a relay main decode has token 0 before its pages: prompt and token are computed in one pass, except
        # where its prediction is wanted.
        direct = self._relay is None and not self._record.trace.relay_instance
        takes_over = direct and not self.route.agreement.wants(self.route.main.instance)
        request = self._open(Tier.MAIN, await_names, takes_over=takes_over)
        self._main = Leg(Tier.MAIN, self.route.main, request, self._put, self._shortcut)

    def _open_main_beside_relay(self) -> None:
        self._main_again = self._now() + MAIN_RETRY_SECONDS
        with suppress(EngineUnavailableError):  # then the relay goes on alone
            # Once the transfer has ended nothing keeps the pages there: what is missing is computed anew.
            self._open_main(self._pages.names if self._transfer.open else ())

    def _open(self, tier: Tier, await_names: tuple[bytes, ...] = (), *, takes_over: bool = False) -> Open:
        request = self.request
        return Open(
            sid=f"{request.request_id}/{tier.value}{next(self._numbers)}",
            mode="prefill" if tier is Tier.PREFILL else "decode",
            prompt=request.prompt,
            sampling=request.sampling,
            await_names=list(await_names),
            cache_salt=request.cache_salt,
            lora=request.lora,
            takes_over=takes_over,
        )

    def _open_relay(self, await_names: tuple[bytes, ...]) -> None:
        assert self.route.relay is not None
        request = self._open(Tier.RELAY, await_names, takes_over=True)
        self._relay = Leg(Tier.RELAY, self.route.relay, request, self._put, self._relay_shortcut)
        self._handoff.relay_opened(self.route.relay, self._now())
        self._record.trace.relay_instance = self._relay.instance

    # ---- events ----

    def _take(self, item: Item) -> TokenBatch | None:
        """Takes in one event; returns the tokens that the user has not seen yet."""
        if isinstance(item, (Notice, Untold)):
            self._notified(item)
            return None
        if isinstance(item, Exception):
            raise item
        leg, event = item
        if leg not in (self._prefill, self._relay, self._main):
            return None  # a leg that was given up
        match event:
            case Tokens():
                return self._tokens(leg, event)
            case Opened():
                self._opened(leg, event)
            case Extended():
                leg.busy = False
                self._predictions.predicted(event.computed, event.prediction, leg.instance)
                self._handoff.computed(leg, self._now())
            case Finished():
                self._finished(leg, event)
            case Failed(status=status, message=message):
                self._failed(leg, message if status < 500 else f"{leg.instance}: {message}", status)
            case Lost(message):
                self._failed(leg, f"{leg.instance} is down: {message}", 503)
        return None

    def _tokens(self, leg: Leg, event: Tokens) -> TokenBatch | None:
        if event.prefilled is not None:
            self.cached_tokens = max(self.cached_tokens, event.prefilled.cached_tokens)
            self._record.hit(event.prefilled.cached_tokens)
            self.prompt_logprobs = event.prefilled.logprobs
        limit = self.request.debug.handoff_at if leg.tier is Tier.RELAY and self._main is not None else None
        batch = self._splice.accept(event.index, event.ids, leg.tier, leg.instance, limit, event.logprobs)
        if batch is not None:
            self._predictions.made()
        if event.last and batch is not None and len(self._splice.tokens) == event.index + len(event.ids):
            self._ending = leg
            batch = dataclasses.replace(batch, last=True)
        return batch

    def _opened(self, leg: Leg, event: Opened) -> None:
        leg.opened = True
        if leg is self._main:
            self._predictions.predicted(0, event.prediction, leg.instance)  # it is opened with the prompt alone
            self._record.main_opened(event)

    def _finished(self, leg: Leg, event: Finished) -> None:
        if leg is self._prefill:
            self._prefill = None
            self._places.leave(leg.instance)
            self._places.prefill_ended()
            self._transfer.prefill_ended()
            if self._pages_lost and not self._main_is_ready():
                self._publish_again()
        # A repeated prefill samples token 0 again; its reason is not the request's.
        if event.reason is not None and (leg.streaming or leg is self._ending):
            self.finish = Finish(event.reason, event.stop_reason)

    # ---- failures ----

    def _failed(self, leg: Leg, message: str, status: int) -> None:
        """A leg ended early: the others go on without it, or the request goes on elsewhere from its token ids."""
        leg.close()
        self._places.leave(leg.instance)
        if status < 500 and not self._splice.tokens:
            raise EngineRejectedError(message, status)
        if leg is self._prefill:
            self._prefill = None
            self._places.prefill_ended()
            if not self._splice.tokens:
                raise EngineUnavailableError(f"prefill failed: {message}")
            if not self._main_is_ready():
                self._publish_again()
        elif leg is self._relay:
            self._relay = None
        else:
            self._main, self._handed_off = None, False
            self._main_again = math.inf if status < 500 else self._now() + MAIN_RETRY_SECONDS
        if self._relay is None and self._main is None:
            self._rescue(message, last=leg.tier)

    def _rescue(self, message: str, last: Tier | None = None) -> None:
        """Nothing decodes: somebody goes on from the token ids, tier `last` only if nobody else is there.

        Before token 0 pages are still to come; afterwards what the engine and its depot lack is computed anew.
        """
        self._rescues += 1
        if self._rescues > MAX_RESCUES:
            raise EngineUnavailableError(message)
        names = () if self._splice.tokens else self._pages.names
        ways = [self._open_relay, self._open_main] if self.route.relay is not None else [self._open_main]
        for way in reversed(ways) if last is Tier.RELAY else ways:
            try:
                way(names)
                return
            except EngineUnavailableError as error:
                message = f"{message}; {error}"
        raise EngineUnavailableError(message)

    def _notified(self, notice: Notice | Untold) -> None:
        if self._main_is_ready():
            return
        if isinstance(notice, Untold):
            self._go_on_without_pages(notice.message, last=Tier.RELAY)
        elif notice is Notice.PAGES_LOST:
            self._publish_again()
        elif notice is Notice.DEPOT_DOWN:
            # A relay beside prefill has lost its depot, too.
            self._go_on_without_pages(f"the depot beside {self.route.placement.prefill} is down", last=Tier.RELAY)
        elif notice is Notice.MAIN_DEPOT_DOWN:
            if self._main is not None:
                self._failed(self._main, f"the depot beside {self._main.instance} is down", 503)
        elif self._relay is None and self.route.relay is not None:
            self._fall_back_to_relay(notice.value)

    def _publish_again(self) -> None:
        """Prefill runs once more for the sake of its pages."""
        self._pages_lost = self._prefill is not None
        if self._pages_lost:
            return  # it may have passed the lost pages already: once more when it has ended
        if self._rescues >= MAX_RESCUES:
            self._go_on_without_pages("pages of the prompt were lost again and again")
            return
        self._rescues += 1
        try:
            self._prefill = Leg(Tier.PREFILL, self.route.prefill, self._open(Tier.PREFILL), self._put)
            self._transfer.prefill_runs()
        except EngineUnavailableError as error:
            self._go_on_without_pages(str(error))

    def _go_on_without_pages(self, message: str, last: Tier | None = None) -> None:
        """What main decode waits for never comes: a relay that has the pages finishes, else the prompt is computed
        where somebody goes on from the token ids."""
        if not self._splice.tokens:
            raise EngineUnavailableError(message)
        if self._main is not None:
            self._main.close()
            self._main, self._main_again = None, math.inf
        if self._relay is not None and not self._relay.opened:
            self._relay.close()
            self._relay = None
        if self._relay is None:
            self._rescue(message, last)

    def _fall_back_to_relay(self, message: str) -> None:
        """Main decode waits for pages that do not come: a relay decodes meanwhile, main decode stays in waiting."""
        if self._main is not None:
            self._main.close()  # it may have been told to decode; two legs must never decode at once
            self._main = None
        self._rescue(message)
        if self._main is None:
            self._open_main_beside_relay()

    # ---- what to do next ----

    def _advance(self) -> None:
        if self.finish is not None or self._ending is not None:
            return
        tokens = self._splice.tokens
        if tokens and self._relay is not None and not self._relay.streaming:
            self._relay.takeover(tokens)
        if self._relay is not None and self._main is None and self._now() >= self._main_again:
            self._open_main_beside_relay()
        if tokens and self._main is not None and not self._main.streaming:
            self._consider_handoff(self._main)
        loaded = self._main_is_ready() and (self._relay is None or self._relay.opened)
        if loaded and self._prefill is None:
            self._transfer.end(keep_sending=False)

    def _consider_handoff(self, main: Leg) -> None:
        if self._relay is None and not self._record.trace.relay_instance:
            main.takeover(self._splice.tokens)  # P-MD: main decode has the ids before its pages are complete
            return
        if self._relay is None:
            action = Action.SWITCH if main.opened else Action.HOLD
        else:
            action = self._handoff.action(main, self._now())
        if action is Action.STAY:
            return
        if action is Action.EXTEND:
            tokens = self._splice.tokens[: main.known + MAX_EXTEND]
            self._handoff.told(main, len(tokens), self._now())
            main.extend(tokens)
            return
        if self._relay is not None:
            self._relay.close()
            self._places.leave(self._relay.instance)
            self._relay = None
        if action is Action.SWITCH:
            self._hand_off(main)

    def _hand_off(self, main: Leg) -> None:
        self._record.handed_off(len(self._splice.tokens), self._handoff, self._pacer.held)
        self._handed_off = True
        self._handoff.switched()
        self._handoff.told(main, len(self._splice.tokens), self._now())
        main.takeover(self._splice.tokens)

    # ---- bookkeeping ----

    def _main_is_ready(self) -> bool:
        return self._main is not None and self._main.opened

    def _arrived(self, batch: TokenBatch) -> None:
        now = self._now()
        if batch.tier is Tier.PREFILL:
            self._record.trace.prefill_done = now
        elif batch.tier is Tier.RELAY:
            self._handoff.relay_decoded(now)
        elif self._main is not None and self._handed_off and self._record.trace.handoff_done is None:
            self._handoff.computed(self._main, now)
            self._handoff.main_decoded()
            self._record.taken_over(self._handoff)
