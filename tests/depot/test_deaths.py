"""Engines, gateways and depots die at any moment: nothing leaks, and nobody reads a page of two productions."""

from __future__ import annotations

from typing import NamedTuple

from depot_kit import PART_BYTES, content, contract, name, names, production_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_intdigest

from pdrelay.depot.base import Leased, PageKind, Part, Transfer
from pdrelay.depot.checksums import unpack_checksums, wrong_parts
from pdrelay.depot.late import LATE_SECONDS
from pdrelay.depot.memory import MemoryDepot, MemoryDisk, MemoryEngineDepot, link
from pdrelay.errors import ArenaFullError

SHAPE = contract()
PAGE, PARTS = SHAPE.page_bytes, SHAPE.layouts[0].parts
NUMBERS, XFERS, GATEWAYS = st.integers(0, 5), st.sampled_from("xyz"), st.sampled_from(["g1", "g2"])


class Order(NamedTuple):
    """What a scheduler ordered its worker to write."""

    owner: str
    number: int
    offset: int
    production: int
    parts: set[int]  # not written yet


class Load(NamedTuple):
    """What a scheduler leased for its worker to read."""

    owner: str
    pages: list[tuple[bytes, Leased]]


class EngineProcess:
    """An engine: a scheduler that reserves and leases, a worker that writes and reads, a connection each."""

    def __init__(self, depot: MemoryDepot, instance: str) -> None:
        self.depot, self.instance = depot, instance
        self.worker: MemoryEngineDepot = depot.engine(instance, SHAPE)
        self.writes: list[Order] = []
        self.loads: list[Load] = []
        self.late: list[tuple[float, set[str]]] = []  # when a scheduler died, and owners that it left to the worker
        self.connect()

    def connect(self) -> None:
        self.scheduler: MemoryEngineDepot = self.depot.engine(self.instance, SHAPE)

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class Deaths(RuleBasedStateMachine):
    """Two linked depots, an engine at each, two gateways."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.productions, self.owners = 0.0, 0, 0
        self.clients: set[str] = set()
        self.p, self.d = self.depot("p"), self.depot("d")
        self.prefill, self.decode = EngineProcess(self.p, "P"), EngineProcess(self.d, "D")
        self.join()

    def depot(self, called: str) -> MemoryDepot:
        pages = 8 if called == "p" else 5
        return MemoryDepot(called, pages * PAGE, clock=lambda: self.now, disk=MemoryDisk(4 * PAGE, stepped=True))

    def join(self) -> None:
        self.link = link(self.p, self.d, stepped=True, batch_bytes=2 * PART_BYTES)

    # Gateways

    @rule(gateway=GATEWAYS, xfer=XFERS, first=NUMBERS, count=st.integers(1, 4))
    def transfer(self, gateway: str, xfer: str, first: int, count: int) -> None:
        with self.p.turn():
            if gateway not in self.clients:
                self.p.hub.client_joins(gateway)
                self.clients.add(gateway)
            wish = Transfer(xfer=xfer, names=names(*range(first, first + count)), to="d", addressee="D")
            self.p.hub.transfer(wish, gateway)

    @rule(xfer=XFERS, demote=st.booleans())
    def end(self, xfer: str, demote: bool) -> None:
        with self.p.turn():
            if demote:
                self.p.hub.demote(xfer)
            else:
                self.p.hub.end(xfer)

    @rule(gateway=GATEWAYS, for_good=st.booleans())
    def gateway_leaves(self, gateway: str, for_good: bool) -> None:
        if gateway in self.clients:
            self.clients.discard(gateway)
            with self.p.turn():
                self.p.hub.client_leaves(gateway, for_good=for_good)

    # Prefill

    @rule(first=NUMBERS, count=st.integers(1, 3))
    def reserve(self, first: int, count: int) -> None:
        numbers = range(first, min(first + count, 6))
        self.owners += 1
        owner = f"r{self.owners}"
        try:
            offsets = self.prefill.scheduler.reserve(owner, names(*numbers), [PageKind.PREFIX] * len(numbers))
        except ArenaFullError:
            return
        for number, offset in zip(numbers, offsets, strict=True):
            if offset is not None:
                self.productions += 1
                self.prefill.writes.append(Order(owner, number, offset, self.productions, set(range(PARTS))))

    @rule(data=st.data(), parts=st.sampled_from([range(2), range(2, 4), range(4)]))
    def write(self, data: st.DataObject, parts: range) -> None:
        """The worker carries out an order, which may be of a scheduler that died since."""
        if self.prefill.writes:
            order = data.draw(st.sampled_from(self.prefill.writes))
            done, page = [], name(order.number)
            for part in sorted(set(parts) & order.parts):
                at = order.offset + part * PART_BYTES
                self.p.arena[at : at + PART_BYTES] = content(page, part, PART_BYTES, order.production)
                done.append(Part(page, part, xxh3_64_intdigest(self.p.arena[at : at + PART_BYTES])))
            self.prefill.worker.publish(order.owner, done)
            order.parts.difference_update(parts)
            if not order.parts:
                self.prefill.writes.remove(order)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The worker is through with a request, and says so."""
        if self.prefill.writes:
            owner = data.draw(st.sampled_from(self.prefill.writes)).owner
            self.prefill.writes = [order for order in self.prefill.writes if order.owner != owner]
            self.prefill.worker.release(owner)

    # Decode

    @rule(first=NUMBERS, count=st.integers(1, 4))
    def lease(self, first: int, count: int) -> None:
        self.owners += 1
        owner, wanted = f"l{self.owners}", names(*range(first, first + count))
        pages = self.decode.scheduler.lease(owner, wanted).pages
        if pages:
            self.decode.loads.append(Load(owner, list(zip(wanted, pages, strict=False))))

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """What the worker takes for good is of one production; the lease ends, whatever it found."""
        if self.decode.loads:
            load = data.draw(st.sampled_from(self.decode.loads))
            self.decode.loads.remove(load)
            for page, leased in load.pages:
                whole = self.d.arena[leased.offset : leased.offset + PAGE]
                if wrong_parts(whole, unpack_checksums(leased.checksums)):
                    self.decode.worker.corrupt(load.owner, [page])
                else:
                    assert production_of(self.decode.worker, page, leased.offset, SHAPE) is not None
            self.decode.worker.release(load.owner)

    # Deaths

    @rule(which=st.sampled_from(["prefill", "decode"]), whole=st.booleans())
    def engine_dies(self, which: str, whole: bool) -> None:
        """The process dies, or only its scheduler's connection breaks, and is made again."""
        engine: EngineProcess = getattr(self, which)
        if whole:
            engine.close()
            setattr(self, which, EngineProcess(engine.depot, engine.instance))
        else:
            engine.scheduler.close()
            engine.connect()
            engine.late.append((self.now, {order.owner for order in engine.writes}))
            engine.loads.clear()  # they count as failed, and were leased by the old connection

    @rule(which=st.sampled_from(["p", "d"]))
    def depot_dies(self, which: str) -> None:
        if self.link.up:
            self.link.cut()
        setattr(self, which, self.depot(which))
        if which == "p":
            self.prefill, self.clients = EngineProcess(self.p, "P"), set()
            self.d.links.clear()
        else:
            self.decode = EngineProcess(self.d, "D")
            self.p.links.clear()
        self.join()

    @rule()
    def cut_or_mend(self) -> None:
        if self.link.up:
            self.link.cut()
        else:
            self.link.mend()

    @rule(number=NUMBERS, part=st.integers(0, PARTS - 1), there=st.booleans())
    def flip(self, number: int, part: int, there: bool) -> None:
        depot = self.d if there else self.p
        page = depot.hub.index.get(name(number))
        if page is not None and page.have >> part & 1:
            depot.arena[page.offset + part * PART_BYTES + 500] ^= 1

    # Time

    @rule(count=st.integers(1, 20))
    def move(self, count: int) -> None:
        for _ in range(count):
            if not self.step():
                return

    @rule(seconds=st.sampled_from([0.3, 2.5, 6.0, 20.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        for since, owners in self.prefill.late:  # steps of an engine do not take so long
            if self.now - since >= LATE_SECONDS:
                self.prefill.writes = [order for order in self.prefill.writes if order.owner not in owners]
        self.p.tick()
        self.d.tick()

    def step(self) -> bool:
        with self.p.turn():
            return self.link.step() or self.p.disk.step() or self.d.disk.step()

    @invariant()
    def room_is_used_once(self) -> None:
        """No order of a worker that lives points into room that was given to somebody else."""
        orders = {(order.offset, order.production): order for order in self.prefill.writes}
        for page in self.p.hub.index:
            at = [order for order in orders.values() if order.offset == page.offset]
            assert all(name(order.number) == page.name for order in at)

    def teardown(self) -> None:
        for gateway in list(self.clients):
            self.gateway_leaves(gateway, True)
        for engine in (self.prefill, self.decode):
            engine.close()
        if not self.link.up:
            self.link.mend()
        while self.step():
            pass
        self.advance(20)
        self.advance(60)
        while self.step():
            pass
        for depot in (self.p, self.d):
            hub = depot.hub
            stats = hub.stats()
            assert (stats.reserved, stats.leases, stats.transfers) == (0, 0, 0)
            assert all(page.users == 0 for page in hub.index)
            assert stats.used_bytes == stats.pages * PAGE
            assert stats.disk.used_bytes == stats.disk.pages * PAGE
            assert not hub._opener
            assert not hub._connections
            assert not hub.receivers._fetches
            assert not hub.senders._by_name


Deaths.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDeaths = Deaths.TestCase
