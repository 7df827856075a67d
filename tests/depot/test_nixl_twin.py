"""The promises of transfers, with pages written straight into the far arena by twins of NIXL agents.

The twins are as disorderly as the real ones may be: chunks of all batches land in any order, notes overtake each other,
and what a sender that is gone had sent lands until the receiver's own agent is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

from depot_kit import PART_BYTES, name, names, produce, production_of, whole, write_parts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_transfers import SHAPE, Pair

from pdrelay.depot import link_messages as messages
from pdrelay.depot.base import LinkState, PageKind, Transfer
from pdrelay.depot.inbox import Landed
from pdrelay.depot.memory import MemoryDepot
from pdrelay.depot.memory_link import MemoryLink
from pdrelay.depot.nixl.base import AgentListener
from pdrelay.depot.nixl.landing import Conversation, Landing
from pdrelay.depot.nixl.lanes import NixlLanes
from pdrelay.depot.nixl.memory import DYING_TURNS, Fabric, MemoryAgent
from pdrelay.depot.outbox import FlyingBatch
from pdrelay.errors import ArenaFullError


class Inline(Executor):
    """Does it at once."""

    def submit(self, work, /, *args, **named):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        future.set_result(work(*args, **named))
        return future


class DirectLink(MemoryLink):
    """A stepped `MemoryLink` whose payload goes by `NixlLanes`, a fabric of twins and a `Landing`."""

    def __init__(self, source: MemoryDepot, target: MemoryDepot, batch_bytes: int) -> None:
        super().__init__(source, target, stepped=True, batch_bytes=batch_bytes)
        self.loop, self.fabric = asyncio.new_event_loop(), Fabric(self.check_landing)
        self.productions: dict[int, int] = {}  # that each grant's page is of
        encoder = source.hub.codecs.encoder(target.hub.name)
        self.lanes = NixlLanes(self.agent_here, 3, source.arena, encoder, self)
        self.landing: Landing | None = None
        self.agents: list[MemoryAgent] = []
        self.trouble = ""
        self.flipped = 0
        source.hub.senders.peers[target.hub.name] = self

    def agent_here(self, listener: AgentListener) -> MemoryAgent:
        self.agents.append(MemoryAgent(self.fabric, self.source.arena, listener))
        return self.agents[-1]

    def agent_there(self, listener: AgentListener) -> MemoryAgent:
        self.agents.append(MemoryAgent(self.fabric, self.target.arena, Flipping(self, listener)))
        return self.agents[-1]

    def run(self, work: Callable[[], Awaitable[None] | None], turns: int = 4) -> None:
        async def main() -> None:
            if (waiting := work()) is not None:
                await waiting
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(main())

    # The conversation

    def connect(self) -> None:
        self.run(self._connect)

    async def _connect(self) -> None:
        source, target = self.source.hub, self.target.hub
        target.peer_contracts(f"peer:{source.name}", source.own_contracts)
        source.peer_contracts(f"peer:{target.name}", target.own_contracts)
        endpoint: asyncio.Future[messages.Endpoint] = self.loop.create_future()

        def ready(told: messages.Endpoint) -> None:
            target.receivers.peer_up(source.name, self._back.append)
            endpoint.set_result(told)

        conversation = Conversation(ready, self._on_batch, target.settle, self.lanes_broken)
        self.landing = Landing(target, source.name, self.agent_there, Inline(), conversation, self.landing)
        await self.lanes.prepare(lambda: endpoint)
        self.up, self.trouble = True, ""
        source.on_contracts[id(self)] = lambda: self.send(messages.Contracts(source.own_contracts))
        self.lanes.open()
        source.senders.link_up(target.name)
        source.links.state(LinkState(target.name, True))

    def cut(self) -> None:
        self.run(self._cut, turns=0)

    def _cut(self) -> None:
        assert self.landing is not None
        self.lanes.close()
        self.landing.close()
        super().cut()

    # What moves

    def step(self, choice: int = 0) -> bool:
        ways = (self.deliver_message, self.deliver_batch, lambda: self.move_bytes(choice // 3))
        moved = any(ways[(choice + at) % 3]() for at in range(3))
        self.settle()
        return moved

    def settle(self) -> None:
        self.run(lambda: None)
        if self.trouble and self.up:
            self.cut()

    def finish(self) -> None:
        self.cut()
        self.run(self.lanes.aclose)
        assert self.landing is not None
        self.run(self.landing.aclose)
        self.loop.close()

    def move_bytes(self, choice: int) -> bool:
        if not self.fabric.pending:
            return False
        self.fabric.step(choice)
        return True

    def deliver_message(self) -> bool:
        senders = self.source.hub.senders
        if self._forth or not self._back:
            return super().deliver_message()
        message = self._back[0]
        if isinstance(message, messages.Ack):
            self._back.popleft()
            for batch in filter(None, map(self.lanes.acked, message.batches)):
                senders.outbox.acknowledged(batch)
            self.source.hub.settle()
            return True
        super().deliver_message()
        if isinstance(message, messages.Revoke):
            self.lanes.revoke([grant for _, grant in message.grants])
        return True

    def deliver_batch(self) -> bool:
        senders, to = self.source.hub.senders, self.target.hub.name
        if not self.up:
            return False
        self.lanes.revoke(senders.outbox.spent.pop(to, ()))
        batch = senders.next_batch(to, self.batch_bytes, self.source.hub.clock(), self.lanes.room)
        if batch is not None:
            self.lanes.put(batch)
        return batch is not None

    def _on_batch(self, number: int | None, landed: list[Landed]) -> None:
        assert number is not None
        if self.up:
            self._back.append(messages.Ack([number]))
        self.target.hub.receivers.landed(landed)

    def check_landing(self, at: int, data: bytes) -> None:
        grants = self.target.hub.receivers.grants._of_peer.get("p", {})
        granted = [(number, grant.page) for number, grant in grants.items()]
        around = [(n, page) for n, page in granted if page.offset <= at < page.offset + SHAPE.page_bytes]
        assert around, "INV-NIXL-5: what lands where nothing is granted hits another page"
        number, page = around[-1]
        start = at - page.offset
        found = [p for p in range(30) if whole(page.name, SHAPE, p)[start : start + len(data)] == data]
        assert found, "INV-DEPOT-5: what is sent was kept until it was read"
        assert self.productions.setdefault(number, found[0]) == found[0], "INV-NIXL-3"

    # See LaneOwner.

    def lanes_ready(self) -> None:
        self.source.hub.settle()

    def batch_written(self, batch: FlyingBatch) -> None:
        self.source.hub.senders.outbox.written(batch)

    def batch_failed(self, batch: FlyingBatch) -> None:
        self.source.hub.senders.outbox.failed(batch)

    def lanes_broken(self, detail: str) -> None:
        self.trouble = detail


class Flipping:
    """Passes on what an agent tells, and flips bits of parts that just arrived, as often as the link says."""

    def __init__(self, link: DirectLink, listener: AgentListener) -> None:
        self._link, self._listener = link, listener
        self.written, self.broken = listener.written, listener.broken

    def notified(self, note: bytes) -> None:
        message = messages.decode_note(note)
        if self._link.corrupt_next and isinstance(message, messages.Batch):
            self._link.corrupt_next -= 1
            self._link.flipped += 1
            run = message.runs[0]
            page = self._link.target.hub.index.get(run.name)
            if page is not None and not page.complete and not page.have >> run.first & 1:
                self._link.target.arena[page.offset + run.first * run.part_bytes] ^= 1
        self._listener.notified(note)


NUMBERS, PARTS = st.integers(0, 2), st.sampled_from([range(2), range(2, 4), range(4), range(4)])


class Direct(RuleBasedStateMachine):
    """Whatever happens in whatever order: no complete page ever has other bytes than its checksums say, and in the end
    what is wanted arrives and nothing is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(pages_there=2, stepped=True)
        self.pair.link.cut()
        for depot in (self.pair.p, self.pair.d):
            depot.links.clear()
        self.link = DirectLink(self.pair.p, self.pair.d, batch_bytes=2 * PART_BYTES)
        self.link.mend()
        self.production: dict[int, int] = {}
        self.live: set[str] = set()

    @rule(first=NUMBERS, count=st.integers(1, 2), parts=PARTS)
    def send(self, first: int, count: int, parts: range) -> None:
        xfer, wanted = f"x{first}", range(first, first + count)
        self.pair.p.hub.transfer(Transfer(xfer=xfer, names=names(*wanted), to="d"), "gateway")
        self.live.add(xfer)
        for number in wanted:
            self.write(number, parts)
        self.talk()

    def write(self, number: int, parts: range) -> None:
        """Writes parts of a page, of a new production if it is absent."""
        if self.pair.prefill.reserve(f"r{number}", names(number), [PageKind.PREFIX]) != [None]:
            self.production[number] = self.production.get(number, 0) + 1
        page = self.pair.p.hub.index.get(name(number))
        assert page is not None
        if not page.complete:
            production = self.production[number]
            write_parts(self.pair.prefill, f"r{number}", page.name, page.offset, SHAPE, parts, production)

    def talk(self) -> None:
        """All control messages arrive, and all that may be sent is on its way."""
        while self.link.deliver_message() or self.link.deliver_batch():
            self.link.run(lambda: None)

    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=6))
    def fly(self, choices: list[int]) -> None:
        for choice in choices:
            self.link.move_bytes(choice)
        self.link.settle()

    @rule()
    def arrive(self) -> None:
        """All that is on its way arrives, but nobody is told of it on the control connection."""
        while self.link.move_bytes(0):
            self.link.settle()

    @rule(number=NUMBERS, parts=PARTS)
    def write_anew(self, number: int, parts: range) -> None:
        """The writer gave up what is not complete, or what was complete is corrupt: another production comes."""
        self.pair.prefill.release(f"r{number}")
        page = self.pair.p.hub.index.get(name(number))
        if page is not None and page.complete:
            self.pair.p.hub.index.condemn(page)
            self.pair.p.hub.settle()
        self.write(number, parts)
        self.talk()

    @rule(number=NUMBERS, talk=st.booleans())
    def end(self, number: int, talk: bool) -> None:
        self.pair.p.hub.end(f"x{number}")
        self.live.discard(f"x{number}")
        if talk:
            self.talk()

    @rule(number=st.integers(20, 23))
    def produce_there(self, number: int) -> None:
        """Another engine needs room in the far arena."""
        with suppress(ArenaFullError):
            produce(self.pair.decode, "there", names(number), SHAPE)

    @rule(flips=st.integers(1, 2))
    def corrupt(self, flips: int) -> None:
        self.link.corrupt_next = flips

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def advance(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @precondition(lambda self: self.link.up)
    @rule()
    def cut(self) -> None:
        self.link.cut()

    @precondition(lambda self: not self.link.up)
    @rule()
    def mend(self) -> None:
        self.link.mend()
        self.talk()

    @precondition(lambda self: self.link.up)
    @rule(which=st.integers(1, 2))
    def kill(self, which: int) -> None:
        """One of the conversation's two agents."""
        self.link.agents[-which].fail("killed")
        self.link.settle()

    @invariant()
    def complete_pages_are_intact(self) -> None:
        for page in self.pair.d.hub.index:
            if page.complete:
                assert self.pair.d.hub.intact(page), "INV-NIXL-5"
                assert production_of(self.pair.decode, page.name, page.offset, SHAPE) is not None

    @invariant()
    def only_flipped_bits_are_corrupt(self) -> None:
        assert self.pair.d.hub.stats().corrupt_parts <= self.link.flipped

    def teardown(self) -> None:
        self.link.corrupt_next = 0
        if not self.link.up:
            self.link.mend()
        for xfer in self.live:
            self.pair.p.hub.end(xfer)
        self.pair.p.hub.transfer(Transfer(xfer="last", names=names(0, 1), to="d"), "gateway")
        for number in range(2):
            self.write(number, range(4))
        while self.link.step():
            self.complete_pages_are_intact()
        self.pair.advance(0.5)
        while self.link.step():
            pass
        assert self.pair.p.hub.senders.stats("last").delivered
        self.pair.p.hub.end("last")
        self.pair.prefill.close()
        self.pair.decode.close()
        while self.link.step():
            pass
        self.pair.check_nothing_is_held()
        assert len(self.pair.d.hub.receivers.grants) == 0
        self.link.finish()


Direct.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDirect = Direct.TestCase


def test_a_note_that_comes_after_its_grant_was_closed_is_not_taken_for_parts_in_other_room() -> None:
    world = Direct()
    world.send(0, 1, range(2))
    while world.link.fabric.writing:
        world.link.move_bytes(0)
    world.link.move_bytes(0)  # it is written, and its note on the way
    world.write_anew(0, range(4))  # gives the grant back, in a note that overtakes the other
    assert world.link.fabric.pending == 2
    world.link.move_bytes(-1)
    world.talk()
    assert world.link.fabric.writing, "the new production, elsewhere"
    world.link.move_bytes(-1)  # the note of the former one
    world.link.settle()
    page = world.pair.d.hub.index.get(name(0))
    assert page is not None
    assert not page.have
    world.teardown()


def test_bytes_stay_where_they_are_until_the_agent_that_reads_them_is_gone() -> None:
    world = Direct()
    world.send(0, 1, range(4))
    page = world.pair.p.hub.index.get(name(0))
    assert page is not None
    world.link.cut()
    world.pair.p.hub.end("x0")
    world.pair.p.hub.index.condemn(page)
    world.link.run(lambda: None, turns=DYING_TURNS // 2)
    assert page.users, "the agent was told to end, and has not ended"
    world.link.run(world.link.lanes.aclose)
    assert not page.users
    world.teardown()
