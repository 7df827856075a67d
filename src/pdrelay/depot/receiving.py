"""Transfers seen from the depot that receives: what it lacks, for what it has room, what arrived.

Room is given first to transfers that are whole at their sender, then in order of arrival, background last: a transfer
waits until all before it have all their room. So two transfers never hold half of what they need each and wait for the
other, nor one that is here for one that waits for room at the sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from pdrelay.depot import link_messages as link
from pdrelay.depot.arena import aligned
from pdrelay.depot.base import PageKind
from pdrelay.depot.contracts import Contracts
from pdrelay.depot.grants import NOWHERE, Grants
from pdrelay.depot.inbox import Inbox, Landed, runs_of_bits
from pdrelay.depot.incoming import Fetch, Receiving
from pdrelay.depot.index import Index
from pdrelay.depot.page import Changes
from pdrelay.depot.tiers import DiskTier
from pdrelay.depot.waiters import HeldPages
from pdrelay.errors import ArenaFullError
from pdrelay.kv.contract import KVContract

LOST_PEER_SECONDS = 15.0
"""What a depot sent stays pinned for so long after its link broke."""

PATIENCE = 8
"""A page that arrived corrupt more often is asked for again only once a tick."""

STARVED_SECONDS = 1.0
"""When nothing arrived for so long while transfers wait for room, those that hold room and fill it not lose it."""

Send = Callable[[link.LinkMessage], None]


class Receivers:
    """All transfers that come in."""

    def __init__(self, index: Index, contracts: Contracts, held: HeldPages, inbox: Inbox, tier: DiskTier) -> None:
        self._index, self._contracts, self._held, self._inbox, self._tier = index, contracts, held, inbox, tier
        self.grants = Grants(index)
        self._live: dict[tuple[str, str], Receiving] = {}
        self._by_name: dict[bytes, dict[Receiving, None]] = {}
        self._fetches: dict[bytes, Fetch] = {}
        self._send: dict[str, Send] = {}  # connected peers
        self._lost_since: dict[str, float] = {}
        self.received_bytes = 0
        self.corrupt_parts = 0
        self.waits = 0
        self._moved = (0, 0.0)  # `received_bytes` at the last look, and when it last differed or nobody waited for room
        self._put_off: list[tuple[Fetch, link.Want]] = []

    def __len__(self) -> int:
        return len(self._live)

    # Peers

    def peer_up(self, peer: str, send: Send) -> None:
        """A depot connected; it will offer its live transfers (again)."""
        self._send[peer] = send
        self._lost_since.pop(peer, None)

    def peer_down(self, peer: str, now: float) -> None:
        """Its connection broke. What came so far stays a while; what others can send is fetched from them."""
        self._send.pop(peer, None)
        self._lost_since[peer] = now
        for name, fetch in [item for item in self._fetches.items() if item[1].receiving.peer == peer]:
            fetch.place = NOWHERE
            if any(other.peer in self._send for other in self._by_name[name]):
                self._index.give_up(fetch.receiving.owner, [name])

    def stats_for(self, peer: str) -> link.Stats:
        """How things are here, for depot `peer`."""
        waiting = sum(1 for r in self._live.values() if r.peer == peer and self._lacks_room(r))
        return link.Stats(room=self._index.available, waiting=waiting, corrupt=self.corrupt_parts)

    def tick(self, now: float) -> None:
        """Ends what a lost peer sent; asks again for what keeps arriving corrupt."""
        put_off, self._put_off = self._put_off, []
        for fetch, want in put_off:
            if self._fetches.get(want.name) is fetch:
                self._tell(fetch.receiving, link.Wants(fetch.receiving.offer.xfer, [want]))
                self._tell(fetch.receiving, link.Suspect(fetch.receiving.offer.xfer, want.name, want.epoch))
        for peer, since in list(self._lost_since.items()):
            if now - since >= LOST_PEER_SECONDS:
                del self._lost_since[peer]
                self._keep_only(peer, ())
        self.grants.tick(now)
        self._watch_room(now)

    def on_closed(self, peer: str, grants: Iterable[int]) -> None:
        """The peer writes no more under these grants. Of a page that is wanted still it has another production now."""
        for number in grants:
            page = self.grants.closed(peer, number)
            fetch = self._fetches.get(page.name) if page is not None else None
            if fetch is not None and fetch.page is page:
                self._index.give_up(fetch.receiving.owner, [page.name])

    def on_message(self, peer: str, message: link.LinkMessage) -> None:
        """A message of depot `peer`."""
        if isinstance(message, link.Live):
            self._keep_only(peer, message.xfers)
        elif isinstance(message, link.Offer):
            self._on_offer(peer, message)
        elif isinstance(message, link.Demoted | link.Ended | link.Whole):
            receiving = self._live.get((peer, message.xfer))
            if receiving is None:
                return
            if isinstance(message, link.Ended):
                self._end(receiving)
            elif isinstance(message, link.Whole):
                receiving.whole = message.whole
                self.pump()
            else:
                self._demote(receiving, message.names)

    def _on_offer(self, peer: str, offer: link.Offer) -> None:
        receiving = self._live.get((peer, offer.xfer))
        if receiving is None:
            receiving = self._accept(peer, offer)
        else:
            receiving.offer, receiving.background = offer, offer.background
            self._shorten(receiving, len(offer.names))
        self._tell(receiving, link.Answered(offer.xfer, self._held_bits(receiving)))
        fetched = [self._fetches[name] for name in receiving.names if name in self._fetches]
        self._want(receiving, [fetch for fetch in fetched if fetch.receiving is receiving])
        receiving.arrived = False
        self._check_arrived(receiving)
        self.pump()

    def _accept(self, peer: str, offer: link.Offer) -> Receiving:
        tails = frozenset(offer.names[len(offer.names) - offer.tails :])
        receiving = Receiving(peer, offer, list(dict.fromkeys(offer.names)), offer.background, tails=tails)
        self._live[receiving.key] = receiving
        self._index.pin(receiving.owner, receiving.names)
        for name in receiving.names:
            self._by_name.setdefault(name, {})[receiving] = None
            if not self._available(receiving, name):
                receiving.lacking[name] = None
        return receiving

    def _demote(self, receiving: Receiving, count: int) -> None:
        receiving.background = True
        self._shorten(receiving, count)
        self._check_arrived(receiving)

    def _keep_only(self, peer: str, xfers: Iterable[str]) -> None:
        live = set(xfers)
        for receiving in [r for r in self._live.values() if r.peer == peer and r.offer.xfer not in live]:
            self._end(receiving)

    def _end(self, receiving: Receiving) -> None:
        del self._live[receiving.key]
        self._shorten(receiving, 0)
        self._index.release(receiving.owner)

    def _shorten(self, receiving: Receiving, count: int) -> None:
        gone, receiving.names = receiving.names[count:], receiving.names[:count]
        for name in gone:
            receiving.lacking.pop(name, None)
            receivings = self._by_name[name]
            del receivings[receiving]
            if not receivings:
                del self._by_name[name]
        self._index.give_up(receiving.owner, gone)
        self._index.unpin(receiving.owner, gone)

    # Asking

    def pump(self) -> None:
        """Asks for what is lacking and has room. Call when room, peers, contracts or writers changed."""
        for receiving in self._in_turn():
            if receiving.lacking and receiving.peer in self._send and not self._reserve(receiving):
                return

    def _reserve(self, receiving: Receiving) -> bool:
        """Reserves and wants what is absent; False when room ran out and younger transfers must wait."""
        self._pin(receiving)
        if receiving.asked:
            return True
        contract = self._contract(receiving)
        absent = [name for name in receiving.lacking if self._index.get(name) is None and name not in self._fetches]
        if contract is None or not absent:
            receiving.asked = not absent
            return True
        ends = list(accumulate(aligned(contract.layout_of(name).page_bytes) for name in absent))
        names = absent[: bisect_right(ends, self._index.available)]
        kinds = [self._kind(receiving, name) for name in names]
        try:
            self._index.reserve(receiving.owner, names, kinds, contract.layout_of)
        except ArenaFullError:  # enough room in all, but in pieces too small
            names = []
        self._want(receiving, [self._open(receiving, name) for name in names if not self._read_back(receiving, name)])
        if len(names) == len(absent):
            receiving.asked = True
            return True
        self.waits += 1
        if ends[-1] > self._index.capacity:
            return True  # what can never fit must not stop the others
        if receiving.whole:
            self._take_room(receiving)
        return False

    def _take_room(self, receiving: Receiving) -> None:
        """Takes back room from later transfers: from pages that are still to be made, else from what they have."""
        turn = self._in_turn()
        later = turn[turn.index(receiving) + 1 :]
        unborn = [
            f for f in self._fetches.values() if f.receiving in later and f.is_untouched and not f.receiving.whole
        ]
        for fetch in unborn:
            self._index.give_up(fetch.receiving.owner, [fetch.page.name])
        if not unborn:
            self._yield_room(later)

    def _read_back(self, receiving: Receiving, name: bytes) -> bool:
        """Whether the page, for which there is room now, need not cross the line because it is on disk here."""
        page = self._index.get(name)
        if page is None or not self._tier.holds(name):
            return False
        self._tier.fill(receiving.owner, page)
        return True

    def _watch_room(self, now: float) -> None:
        """Breaks two deadlocks. The sender's arena is full of a transfer that waits for room here, which another holds
        whose pages find no room there: the other comes last from now on. Or the room is full of complete pages of
        transfers that all wait for more: all but the first let theirs go."""
        received, since = self._moved
        if received != self.received_bytes or not self._waits_for_room():
            self._moved = self.received_bytes, now
        elif now - since >= STARVED_SECONDS:
            self._moved = received, now
            unfilled = [(name, fetch) for name, fetch in self._fetches.items() if fetch.is_untouched]
            for name, fetch in unfilled:
                receiving = fetch.receiving
                self._live[receiving.key] = self._live.pop(receiving.key)
                self._index.give_up(receiving.owner, [name])
            if not unfilled:
                self._yield_room([r for r in self._in_turn() if r.lacking and r.peer in self._send][1:])

    def _yield_room(self, transfers: Iterable[Receiving]) -> None:
        for receiving in transfers:
            if receiving.lacking and not receiving.arrived and not receiving.yielded:
                receiving.yielded = True
                complete = [name for name in receiving.names if self._index.complete(name)]
                self._index.unpin(receiving.owner, complete)

    def _pin(self, receiving: Receiving) -> None:
        if receiving.yielded:
            receiving.yielded = False
            self._index.pin(receiving.owner, receiving.names)

    def _in_turn(self) -> list[Receiving]:
        return sorted(self._live.values(), key=lambda receiving: (receiving.background, not receiving.whole))

    def _waits_for_room(self) -> bool:
        return any(self._lacks_room(receiving) for receiving in self._live.values())

    def _lacks_room(self, receiving: Receiving) -> bool:
        return any(self._index.get(name) is None for name in receiving.lacking)

    def _open(self, receiving: Receiving, name: bytes) -> Fetch:
        page = self._index.get(name)
        assert page is not None
        assert name not in self._fetches, "INV-DEPOT-7: a name is received from one transfer at a time"
        self._index.hold(page)
        fetch = self._fetches[name] = Fetch(receiving, page, self._inbox.open(page, receiving.peer))
        return fetch

    def _want(self, receiving: Receiving, fetches: Sequence[Fetch]) -> None:
        if not fetches:
            return
        wants = []
        for fetch in fetches:
            if not fetch.place.grant:
                fetch.place = self.grants.give(receiving.peer, fetch.page)
                self._inbox.grant(fetch.slot, fetch.place.grant)
            lacking = ((1 << fetch.page.layout.parts) - 1) & ~fetch.page.have
            wants.append(link.Want(fetch.page.name, fetch.epoch, link.pack_bits(lacking), *fetch.place))
        self._tell(receiving, link.Wants(receiving.offer.xfer, wants))

    def _contract(self, receiving: Receiving) -> KVContract | None:
        contract = self._contracts.of(f"engine:{receiving.offer.addressee}:") if receiving.offer.addressee else None
        contract = contract or receiving.offer.contract or self._contracts.of(f"peer:{receiving.peer}")
        return contract or self._contracts.only()

    def _held_bits(self, receiving: Receiving) -> bytes:
        held = sum(1 << at for at, name in enumerate(receiving.names) if self._is_here(receiving, name))
        return link.pack_bits(held)

    def _is_here(self, receiving: Receiving, name: bytes) -> bool:
        return name not in receiving.lacking or self._tier.holds(name)

    def _kind(self, receiving: Receiving, name: bytes) -> PageKind:
        return PageKind.TRANSFER if name in receiving.tails else PageKind.PREFIX

    # Receiving

    def landed(self, results: Sequence[Landed]) -> None:
        """What bulk connections received."""
        for result in results:
            fetch = self._fetches.get(result.slot.page.name)
            if fetch is not None and fetch.slot is result.slot:
                self._take(fetch, result)
            if self._inbox.report(result):
                self._index.unhold(result.slot.page)

    def _take(self, fetch: Fetch, result: Landed) -> None:
        page, owner = fetch.page, fetch.receiving.owner
        if result.epoch > fetch.epoch and (result.good or result.corrupt):
            fetch.epoch, fetch.failures = result.epoch, 0
            if page.have:
                self._index.restart(owner, page.name)
        if result.epoch == fetch.epoch:
            for first, count in runs_of_bits(result.good):
                at = first - result.first
                fidelity = result.fidelity if result.inexact >> first & (1 << count) - 1 else ""
                self._index.publish(owner, page.name, first, result.checksums[at : at + count], fidelity)
        self.received_bytes += result.good.bit_count() * page.layout.part_bytes
        self.corrupt_parts += result.corrupt.bit_count()
        if lost := result.corrupt | result.again:
            fetch.failures += bool(result.corrupt)
            want = link.Want(page.name, result.epoch, link.pack_bits(lost), *fetch.place)
            if fetch.failures > PATIENCE:  # not the line's fault: do not spend the line on it
                self._put_off.append((fetch, want))
            else:
                self._tell(fetch.receiving, link.Wants(fetch.receiving.offer.xfer, [want]))

    # What happens to pages here

    def on_changes(self, changes: Changes) -> None:
        """Pages came, went or were lost, from whatever source."""
        for name in changes.removed:
            for receiving in self._by_name.get(name, ()):
                if not self._available(receiving, name):
                    self._lacks(receiving, name)
        for name in changes.completed:
            self._close(name)
            for receiving in list(self._by_name.get(name, ())):
                receiving.lacking.pop(name, None)
                self._check_arrived(receiving)
        for name, _ in changes.lost:
            self._close(name)
            for receiving in self._by_name.get(name, ()):
                receiving.asked = False
        if changes.room or changes.lost:
            self.pump()

    def held_changed(self, instance: str, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The cache of `instance` changed: what it lost must come after all."""
        for name in (*added, *removed):
            for receiving in list(self._by_name.get(name, ())):
                if receiving.offer.addressee != instance:
                    continue
                if self._available(receiving, name):
                    receiving.lacking.pop(name, None)
                    self._check_arrived(receiving)
                else:
                    self._lacks(receiving, name)
        if removed:
            self.pump()

    def _lacks(self, receiving: Receiving, name: bytes) -> None:
        receiving.lacking[name] = None
        receiving.asked = False

    def _close(self, name: bytes) -> None:
        fetch = self._fetches.pop(name, None)
        if fetch is None:
            return
        if self._inbox.close(fetch.slot):
            self._index.unhold(fetch.page)
        if self.grants.revoke(fetch.receiving.peer, fetch.place.grant):
            self._tell(fetch.receiving, link.Revoke([(name, fetch.place.grant)]))

    def _available(self, receiving: Receiving, name: bytes) -> bool:
        addressee = receiving.offer.addressee
        return self._index.complete(name) or (bool(addressee) and self._held.holds(addressee, name))

    def _check_arrived(self, receiving: Receiving) -> None:
        if not receiving.lacking and not receiving.arrived:
            receiving.arrived = True
            self._pin(receiving)
            self._tell(receiving, link.Arrived(receiving.offer.xfer))

    def _tell(self, receiving: Receiving, message: link.LinkMessage) -> None:
        if (send := self._send.get(receiving.peer)) is not None:
            send(message)
