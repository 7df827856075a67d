"""The depot without its sockets: index, engines' caches, waiters, subscribers and transfers, kept in step.

One thread owns a hub. The server calls it from its event loop, the in-memory twin under a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from uuid import uuid4

from pdrelay.depot.base import (
    DepotEvent,
    DepotStats,
    Forgotten,
    Leased,
    Leases,
    PageKind,
    Part,
    Progress,
    Removed,
    Stored,
    Transfer,
    TransferStats,
    Use,
)
from pdrelay.depot.checksums import pack_checksums, wrong_parts
from pdrelay.depot.contracts import Contracts
from pdrelay.depot.disk import Disk, NoDisk
from pdrelay.depot.inbox import Inbox
from pdrelay.depot.index import Index
from pdrelay.depot.late import LateWriters
from pdrelay.depot.link_book import LinkBook
from pdrelay.depot.page import Changes, Page
from pdrelay.depot.payload import LinkCodecs
from pdrelay.depot.receiving import Receivers
from pdrelay.depot.sending import Senders
from pdrelay.depot.tiers import DiskTier
from pdrelay.depot.waiters import HeldPages, Waiter, Waiters
from pdrelay.errors import ArenaFullError, ContractError
from pdrelay.kv.contract import KVContract

ORPHAN_SECONDS = 5.0
"""How long the transfers of a gateway whose connection broke wait for it to come back."""

NAMES_AT_ONCE = 4096
"""Names in one of the events that open a subscription."""


class Hub:
    """All state of one depot."""

    def __init__(
        self,
        name: str,
        arena: memoryview,
        fleet_key: bytes,
        clock: Callable[[], float],
        epoch_base: int = 0,
        codecs: LinkCodecs | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.name, self.arena, self.fleet_key, self.clock = name, arena, fleet_key, clock
        self.epoch = uuid4().hex
        self.index = Index(len(arena), epoch_base)
        self.contracts = Contracts(self.index)
        self.held = HeldPages()
        self.tier = DiskTier(self.index, arena, disk if disk is not None else NoDisk(), clock)
        self.tier.after = self.settle
        self.contracts.on_void = self.tier.forget_layouts
        self.waiters = Waiters(self.index, self.held, self.tier.recall)
        self.codecs = codecs or LinkCodecs()
        self.inbox = Inbox(arena, self.codecs)
        self.senders = Senders(self.index, self.contracts, self.emit, self.intact, self.tier, self.held)
        self.receivers = Receivers(self.index, self.contracts, self.held, self.inbox, self.tier)
        self.on_contracts: dict[int, Callable[[], None]] = {}
        self.links = LinkBook(self.emit)
        self.cut_connections: list[Counter[str]] = []  # of each listener, by reason
        self._subscribers: dict[int, Callable[[DepotEvent], None]] = {}
        self._ids = count(1)
        self.late = LateWriters(self.index)
        self._connections: dict[str, set[int]] = {}  # of each engine
        self._opener: dict[str, int] = {}  # owner -> the connection that first named it
        self._clients: dict[str, int] = {}  # connections of each gateway
        self._orphans: dict[str, float] = {}  # gateways without connection, since when
        self._use: dict[str, Use] = {}
        self._settling = False

    # Engines

    def engine_joins(self, instance: str, contract: KVContract) -> int:
        """A connection of an engine; its id. Raises ContractError when it does not fit those already here."""
        connection = next(self._ids)
        self.contracts.join(f"engine:{instance}:{connection}", contract)
        self._connections.setdefault(instance, set()).add(connection)
        self._contracts_changed()
        return connection

    def engine_leaves(self, instance: str, connection: int) -> None:
        """The connection closed: all owners that it named first end."""
        self._connections[instance].discard(connection)
        for owner in [owner for owner, opener in self._opener.items() if opener == connection]:
            del self._opener[owner]
            others = set(self._connections[instance])
            self.late.owner_died(owner, others, self.clock())
        self.late.connection_closed(connection)
        if not self._connections[instance]:
            del self._connections[instance]
        self.contracts.leave(f"engine:{instance}:{connection}")
        if gone := self.held.forget(instance, connection):
            self.emit(Forgotten(instance))
            if names := self.held.names_of(instance):
                self.emit(Stored(instance, names))
            self.receivers.held_changed(instance, [], list(gone))
        self._contracts_changed()

    def match(self, names: Sequence[bytes]) -> int:
        """See EngineDepot.match."""
        count = self.tier.available(names)
        self._recall(names[:count])
        return count

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        """See EngineDepot.holds."""
        return [self.tier.available([name]) == 1 for name in names]

    def lease(self, connection: int, owner: str, names: Sequence[bytes]) -> Leases:
        """See EngineDepot.lease."""
        pages = self.index.lease(owner, names)
        if pages:
            self._opener.setdefault(owner, connection)
        leased = [Leased(page.offset, pack_checksums(page.checksums), page.from_disk) for page in pages]
        for page in pages:
            page.from_disk = False
        rest = names[len(pages) :]
        coming = self.tier.available(rest)
        self._recall(rest[:coming])
        return Leases(leased, coming)

    def _recall(self, names: Sequence[bytes]) -> None:
        self.index.touch(names)  # or those in the arena would go for the sake of those on disk
        self.tier.recall(names)
        self.settle()

    def corrupt(self, owner: str, names: Sequence[bytes]) -> None:
        """See EngineDepot.corrupt."""
        for page in self.index.leased(owner):
            if page.name in names:
                self.index.condemn(page)
        self.settle()

    def intact(self, page: Page) -> bool:
        """Whether the bytes of the parts that are written fit their checksums."""
        data = self.arena[page.offset : page.offset + page.layout.page_bytes]
        return not wrong_parts(data, page.checksums, page.have)

    def reserve(
        self, connection: int, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind], contract: KVContract
    ) -> list[int | None]:
        """See EngineDepot.reserve."""
        try:
            offsets = self._reserve(owner, names, kinds, contract)
        finally:
            self.settle()
        if any(offset is not None for offset in offsets):
            self._opener.setdefault(owner, connection)
        return offsets

    def _reserve(
        self, owner: str, names: Sequence[bytes], kinds: Sequence[PageKind], contract: KVContract
    ) -> list[int | None]:
        while True:
            try:
                offsets = self.index.reserve(owner, names, kinds, contract.layout_of)
            except ArenaFullError as error:
                # Pages that only a demoted transfer keeps here must not hold up a prompt that somebody waits for.
                if error.hopeless:
                    raise
                if not self.senders.shed():
                    self.senders.keeping.refused(self.clock())
                    raise
            else:
                self.senders.keeping.admitted()
                return offsets

    def publish(self, owner: str, parts: Sequence[Part | tuple[bytes, int, int]]) -> None:
        """See EngineDepot.publish. Raises ProtocolError."""
        for name, part, checksum in parts:
            self.index.publish(owner, name, part, (checksum,))
        self.settle()

    def release(self, owner: str) -> None:
        """See EngineDepot.release."""
        self._opener.pop(owner, None)
        self.index.release(owner)
        self.late.released(owner)
        self.settle()

    def report_held(self, instance: str, connection: int, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineDepot.report_held."""
        self.held.report(instance, connection, added, removed)
        if removed:
            self.emit(Removed(instance, list(removed)))
        if added:
            self.emit(Stored(instance, list(added)))
            self.waiters.arrived(added, instance)
        self.receivers.held_changed(instance, added, removed)
        self.settle()

    def report_use(self, instance: str, use: Use) -> None:
        """See EngineDepot.report_use."""
        self._use[instance] = self._use.get(instance, Use()) + use

    # Gateways

    def client_joins(self, client: str) -> None:
        """A connection of a gateway; its transfers live on."""
        self._clients[client] = self._clients.get(client, 0) + 1
        self._orphans.pop(client, None)

    def client_leaves(self, client: str, *, for_good: bool) -> None:
        """A gateway's connection closed."""
        self._clients[client] -= 1
        if self._clients[client] > 0:
            return
        del self._clients[client]
        if for_good:
            self.senders.client_gone(client)
        else:
            self._orphans[client] = self.clock()
        self.settle()

    def keep_only(self, client: str, xfers: Sequence[str]) -> None:
        """A gateway is back: what it ended while it could not say so ends now."""
        self.senders.client_gone(client, but=xfers)
        self.settle()

    def wait(self, names: Sequence[bytes], engine: str, done: Callable[[], None]) -> Waiter:
        """See DepotControl.wait; `done` is called once, perhaps at once."""
        waiter = self.waiters.add(names, engine, done)
        self.settle()
        return waiter

    def transfer(self, transfer: Transfer, client: str) -> None:
        """See DepotControl.transfer. Raises DepotError for a depot that no link leads to."""
        self.senders.start(transfer, client, self.clock())
        self._recall(transfer.names)

    def demote(self, xfer: str) -> None:
        """See DepotControl.demote."""
        self.senders.demote(xfer)
        self.settle()

    def end(self, xfer: str) -> TransferStats:
        """See DepotControl.end."""
        stats = self.senders.end(xfer)
        self.settle()
        return stats

    def progress(self) -> list[Progress]:
        """See DepotControl.progress."""
        return self.senders.progress(self.clock())

    def stats(self) -> DepotStats:
        """See DepotControl.stats."""
        return DepotStats(
            pages=len(self.index),
            reserved=self.index.reserved,
            pinned=self.index.pinned,
            leases=self.index.owners,
            transfers=len(self.senders) + len(self.receivers),
            used_bytes=self.index.used_bytes,
            capacity_bytes=self.index.capacity,
            sent_bytes=self.senders.outbox.sent_bytes,
            sent_wire_bytes=self.senders.outbox.sent_wire_bytes,
            received_bytes=self.receivers.received_bytes,
            received_wire_bytes=sum(decoder.traffic.wire_bytes for decoder in list(self.codecs.decoders.values())),
            lossy_pages=sum(bool(page.fidelity) for page in self.index),
            corrupt_parts=self.receivers.corrupt_parts,
            corrupt_pages=self.index.condemned,
            evicted_pages=self.index.evicted,
            reserve_waits=self.index.reserve_waits + self.receivers.waits,
            disk=self.tier.stats(),
            use=dict(self._use),
            links=self.links.stats(),
        )

    # Other depots

    @property
    def key_check(self) -> bytes:
        """Proves the fleet key to another depot."""
        return blake2b(key=self.fleet_key, digest_size=16, person=b"pdrelay.check").digest()

    @property
    def own_contracts(self) -> list[KVContract]:
        """Contracts of the engines on this host."""
        return self.contracts.declared("engine:")

    def peer_contracts(self, holder: str, contracts: Sequence[KVContract]) -> None:
        """What the engines beside a peer use. Raises ContractError when they differ from ours."""
        self.contracts.leave(holder)
        try:
            for contract in contracts:
                self.contracts.join(holder, contract)
        except ContractError:
            self.contracts.leave(holder)
            raise
        self.receivers.pump()
        self.settle()

    def _contracts_changed(self) -> None:
        self.settle()
        self.receivers.pump()
        for tell in list(self.on_contracts.values()):
            tell()
        self.settle()

    # Events

    def subscribe(self, tell: Callable[[DepotEvent], None]) -> int:
        """Tells the present holdings at once and all events from now on; the subscription's id."""
        here = dict.fromkeys(page.name for page in self.index if page.complete) | dict.fromkeys(self.tier)
        holdings = {self.name: list(here)}
        holdings |= {instance: self.held.names_of(instance) for instance in self.held.instances()}
        for holder, names in holdings.items():
            for start in range(0, len(names), NAMES_AT_ONCE):  # no frame so long that it looks like silence
                tell(Stored(holder, names[start : start + NAMES_AT_ONCE]))
        for event in self.links.events():
            tell(event)
        subscription = next(self._ids)
        self._subscribers[subscription] = tell
        return subscription

    def unsubscribe(self, subscription: int) -> None:
        """Ends a subscription."""
        self._subscribers.pop(subscription, None)

    def emit(self, event: DepotEvent) -> None:
        """Tells every subscriber."""
        for tell in list(self._subscribers.values()):
            tell(event)

    # Keeping in step

    def settle(self) -> None:
        """Acts on what changed in the index, until nothing more follows from it."""
        if self._settling:
            return
        self._settling = True
        try:
            while changes := self.index.take_changes():
                self._tell_holdings(changes)
                self.receivers.on_changes(changes)
                self.tier.on_changes(changes)
                self.senders.on_changes(changes, self.clock())
            if gone := self.tier.take_removed():
                self.emit(Removed(self.name, gone))
        finally:
            self._settling = False

    def _tell_holdings(self, changes: Changes) -> None:
        # A name may have come and gone since the last look: what counts is whether it is here now.
        if removed := [name for name in changes.removed if not self.tier.available([name])]:
            self.emit(Removed(self.name, removed))
        if stored := [name for name in changes.completed if self.index.complete(name)]:
            self.emit(Stored(self.name, stored))
            self.waiters.arrived(stored)

    def tick(self) -> None:
        """Call a few times a second."""
        now = self.clock()
        for client, since in list(self._orphans.items()):
            if now - since >= ORPHAN_SECONDS:
                del self._orphans[client]
                self.senders.client_gone(client)
        self.senders.tick(now)
        self.receivers.tick(now)
        self.tier.tick(now)
        self.late.tick(now)
        self.index.expire(now)
        self.settle()
