"""Engines and a depot whose every event the test decides."""

import asyncio
import time

from pdrelay.depot.base import TransferStats
from pdrelay.engine.base import EngineStatus
from pdrelay.engine.messages import Extended, Finished, Opened, Prefilled, Sampling, Tokens
from pdrelay.errors import DepotUnavailableError, EngineUnavailableError
from pdrelay.gateway.agreement import AgreementMonitor
from pdrelay.gateway.base import DebugControls, GenerationRequest
from pdrelay.gateway.handoff import Handoffs
from pdrelay.gateway.places import Occupancy, Places
from pdrelay.gateway.request import RequestRun
from pdrelay.gateway.route import Route
from pdrelay.kv.demand import Demand
from pdrelay.kv.names import prompt_pages
from pdrelay.policy.base import Pipeline, Placement
from pdrelay.policy.handoff import RelayBound, Settings

PAGES = Demand(prompt_pages(list(range(40)), 16, b"r" * 32, b"k").names, tails=1)


class ScriptedSession:
    def __init__(self, request):
        self.extends = []
        self.request, self.aborted, self.ended, self.takeovers = request, False, False, []
        self._listener = self._tap = None

    def listen(self, listener, tap=None):
        self._listener, self._tap = listener, tap

    def takeover(self, ids):
        self.takeovers.append(list(ids))

    def extend(self, ids):
        self.extends.append(list(ids))

    def extended(self):
        self.send(Extended("", 0, 0))

    def abort(self):
        self.aborted = self.ended = True

    def opened(self):
        self.send(Opened(sid="", cached_tokens=0, loaded_tokens=0, pages_ready=0.0, ready=0.0, prediction=0))

    def tokens(self, index, *ids, last=False, cached=None):
        prefilled = None if cached is None else Prefilled(cached_tokens=cached)
        self.send(Tokens("", index, list(ids), last, prefilled=prefilled))

    def finished(self, reason):
        self.ended = True
        self.send(Finished(sid="", reason=reason))

    def send(self, event):
        tapped = isinstance(event, Tokens) and self._tap is not None
        if not self.aborted and not (tapped and self._tap(event)):
            self._listener.event(event)

    def lose(self):
        self.ended = True
        self._listener.lost("connection lost")


class ScriptedEngine:
    def __init__(self, instance):
        self.instance, self.sessions, self.down = instance, [], False

    @property
    def status(self):
        return EngineStatus(not self.down, 0.0, "", None, None)

    def open(self, request):
        if self.down:
            raise EngineUnavailableError(f"{self.instance} is down")
        self.sessions.append(ScriptedSession(request))
        return self.sessions[-1]

    @property
    def last(self):
        return self.sessions[-1]

    @property
    def told(self):
        """Output tokens that each live session was told."""
        return [sum(map(len, session.extends + session.takeovers)) for session in self.live]

    @property
    def live(self):
        return [session for session in self.sessions if not session.ended]


class ScriptedDepot:
    fleet_key = b"k"

    def __init__(self):
        self.open, self.produced, self.demoted, self.ended = set(), [], [], []
        self.lost_stats = False
        self.stats_come = asyncio.Event()
        self.stats_come.set()

    async def transfer(self, transfer):
        self.open.add(transfer.xfer)
        if transfer.produced:
            self.produced.append(transfer.xfer)

    async def demote(self, xfer):
        self.demoted.append(xfer)
        self.open.discard(xfer)

    async def end(self, xfer):
        self.ended.append(xfer)
        self.open.discard(xfer)
        return TransferStats(sent=14, wire=7, saved=5)

    async def transfer_stats(self, xfer):
        await self.stats_come.wait()
        if self.lost_stats:
            raise DepotUnavailableError("connection lost")
        return TransferStats(sent=6, wire=3, saved=5)


class Scene:
    """One request on scripted parts; `seen` is what the user got."""

    def __init__(self, pipeline=Pipeline.P_RLD_MD, handoff_at=None, spare_relay=True, mode="one_shot", pace=1.0):
        self.p, self.rld, self.md = (ScriptedEngine(name) for name in ("p-0", "rld-0", "md-0"))
        self.depot, self.seen, self.error = ScriptedDepot(), [], None
        relay = "rld-0" if pipeline is Pipeline.P_RLD_MD else None
        route = Route(
            Placement(pipeline, "p-0", relay, "md-0", 0.5, ""),
            self.p,
            self.rld if relay or spare_relay else None,
            self.md,
            self.depot,
            "host-b",
            Handoffs(Settings(mode, RelayBound(100, 100.0), pace)),
            AgreementMonitor(0.8),
        )
        request = GenerationRequest(
            "r-1",
            time.monotonic(),
            list(range(40)),
            Sampling(max_tokens=1 << 20),  # the end is never so near that a handoff would not pay
            debug=DebugControls(handoff_at=handoff_at),
        )
        self.occupancy = Occupancy()
        places = Places(self.occupancy, ["p-0", "md-0", *([relay] if relay else [])], "p-0", 24)
        self.run = RequestRun(request, PAGES, route, places, on_close=lambda: None)
        self._task = None

    async def __aenter__(self):
        self._task = asyncio.create_task(self._consume())
        await self.settle()
        return self

    async def __aexit__(self, *exc):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.run.aclose()
        await self.settle()
        # INV-LEASE-1: a request that ended holds no session, no transfer and no place.
        assert not self.depot.open
        assert not self.occupancy.requests.total()
        assert not self.occupancy.backlog.total()
        for engine in (self.p, self.rld, self.md):
            assert not engine.live

    async def _consume(self):
        try:
            async for batch in self.run:
                assert batch.index == len(self.seen)
                self.seen += batch.ids
        except Exception as error:  # the test asserts which
            self.error = error

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    async def prefill(self, token=100):
        self.p.last.tokens(0, token, cached=16)
        self.p.last.finished(None)
        await self.settle()
