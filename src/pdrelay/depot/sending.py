"""Transfers seen from the depot that sends: what the other side wants, whose turn it is, when producers are lost.

State only: bytes, sockets and clocks are elsewhere. A `Peer` is how messages leave; bulk connections take batches with
`next_batch` and tell `outbox` what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pdrelay.depot import link_messages as link
from pdrelay.depot.base import Delivered, DepotEvent, Offered, Progress, Stalled, Transfer, TransferStats
from pdrelay.depot.contracts import Contracts
from pdrelay.depot.grants import Place
from pdrelay.depot.index import Index
from pdrelay.depot.keeping import Keeping
from pdrelay.depot.outbox import FlyingBatch, Outbox, Sending, Wanted
from pdrelay.depot.page import Changes, Page
from pdrelay.depot.peer import Peer
from pdrelay.depot.progress import Line, progress_of
from pdrelay.depot.tiers import DiskTier
from pdrelay.depot.waiters import HeldPages
from pdrelay.errors import DepotError

STALL_SECONDS = 2.0
LOST_LINK_SECONDS = 15.0
"""A demoted transfer is given up when its link is down for so long; the other side lets go then too."""

IDLE_SECONDS = 60.0
"""A demoted transfer is given up when nothing of it arrived for so long, be it that the far arena has no room."""

Fits = Callable[[str, int], bool]
"""Whether a batch of a transfer, of an urgency, may be put now."""

LargeBatch = Callable[[int], int]
"""Size of a batch of a transfer of which so many bytes are ready."""


def _fit_always(*_: object) -> bool:
    return True


def _never_large(_: int) -> int:
    return 0


class Senders:
    """All transfers that this depot sends or pins."""

    def __init__(
        self,
        index: Index,
        contracts: Contracts,
        emit: Callable[[DepotEvent], None],
        intact: Callable[[Page], bool],
        tier: DiskTier,
        held: HeldPages,
    ) -> None:
        """`intact` says whether the bytes of a page's published parts fit their checksums."""
        self._index, self._contracts, self._emit, self._intact, self._tier = index, contracts, emit, intact, tier
        self._held = held
        self.peers: dict[str, Peer] = {}
        self.outbox = Outbox(index)
        self._live: dict[str, Sending] = {}
        self._by_name: dict[bytes, set[Sending]] = {}
        self.keeping = Keeping(index, self._by_name, self._tell_whole)

    def __len__(self) -> int:
        return len(self._live)

    # The gateway's calls

    def start(self, transfer: Transfer, client: str, now: float) -> None:
        """Starts or, when it lives already, adopts a transfer. Raises DepotError for an unknown depot."""
        known = self._live.get(transfer.xfer)
        if known is not None:
            known.client, known.produced = client, transfer.produced
            self._tell_state(known)
            return
        if transfer.to is not None and transfer.to not in self.peers:
            raise DepotError(f"no link to depot {transfer.to!r}; linked are: {', '.join(sorted(self.peers)) or 'none'}")
        sending = Sending(transfer, list(dict.fromkeys(transfer.names)), client, now, produced=transfer.produced)
        if transfer.to is not None and not self.peers[transfer.to].up:
            sending.link_lost = now
        self._live[transfer.xfer] = sending
        for name in sending.names:
            self._by_name.setdefault(name, set()).add(sending)
        self.keeping.start(sending, now)
        self._offer(sending)
        if (peer := self._peer(sending)) is not None:
            peer.prepare()

    def demote(self, xfer: str) -> None:
        """Goes on at low priority without the tail, and ends when all is delivered."""
        sending = self._live.get(xfer)
        if sending is None or sending.demoted:
            return
        sending.demoted = True
        if sending.transfer.to is None:
            self.end(xfer)
            return
        self._shorten(sending, len(sending.names) - sending.transfer.tails)

    def end(self, xfer: str) -> TransferStats:
        """Ends a transfer at both ends."""
        sending = self._live.pop(xfer, None)
        if sending is None:
            return TransferStats()
        self._forget(sending, sending.names)
        if (peer := self._peer(sending)) is not None:
            peer.send(link.Ended(xfer))
        return sending.stats

    def stats(self, xfer: str) -> TransferStats:
        """What the transfer cost so far; zeros for an unknown one."""
        sending = self._live.get(xfer)
        return sending.stats if sending is not None else TransferStats()

    def progress(self, now: float) -> list[Progress]:
        """See DepotControl.progress."""
        found: list[Progress] = []
        for to in {sending.transfer.to for sending in self._live.values()}:
            alike = [sending for sending in self._live.values() if sending.transfer.to == to]
            peer = self.peers.get(to) if to is not None else None
            line = Line(peer.rate, peer.rtt, peer.schedule) if peer is not None and peer.up else None
            found += progress_of(alike, line, now)
        return sorted(found, key=lambda progress: -progress.age)

    def client_gone(self, client: str, but: Collection[str] = ()) -> None:
        """Ends the transfers that `client` started, but for demoted ones and those in `but`."""
        for sending in [sending for sending in self._live.values() if sending.client == client]:
            if not sending.demoted and sending.transfer.xfer not in but:
                self.end(sending.transfer.xfer)

    def shed(self) -> bool:
        """Ends the youngest demoted transfer, the one that would be delivered last; False when there is none."""
        demoted = [sending for sending in self._live.values() if sending.demoted]
        if demoted:
            self.end(demoted[-1].transfer.xfer)
        return bool(demoted)

    # The other depot's messages

    def link_up(self, to: str) -> None:
        """The link came up: offers every live transfer (again)."""
        to_peer = [sending for sending in self._live.values() if sending.transfer.to == to]
        self.peers[to].send(link.Live([sending.transfer.xfer for sending in to_peer]))
        for sending in to_peer:
            sending.link_lost = None
            self._offer(sending)

    def link_down(self, to: str, now: float) -> None:
        """The link is gone, with all that was under way; what is wanted will be told anew."""
        self.outbox.spent.pop(to, None)
        for sending in self._live.values():
            if sending.transfer.to == to:
                sending.link_lost = now
                sending.forget_all()

    def on_message(self, origin: str, message: link.LinkMessage) -> None:
        """An answer of depot `origin`."""
        if isinstance(message, link.Revoke):
            self._on_revoke(origin, message)
            return
        xfer = getattr(message, "xfer", "")
        sending = self._live.get(xfer)
        if sending is None or sending.transfer.to != origin:
            return
        if isinstance(message, link.Answered):
            self._on_answered(sending, message.held)
        elif isinstance(message, link.Wants):
            self._on_wants(sending, message.wants)
        elif isinstance(message, link.Suspect):
            self._on_suspect(message)
        elif isinstance(message, link.Arrived):
            self._on_arrived(sending)

    def _on_answered(self, sending: Sending, bits: bytes) -> None:
        if sending.have is None:
            contract, held = self._contracts.only(), link.unpack_bits(bits)
            names = [name for at, name in enumerate(sending.names) if held >> at & 1]
            sending.have = len(names)
            if contract is not None:
                sending.saved = sum(contract.layout_of(name).page_bytes for name in names)
                sending.total = sum(contract.layout_of(name).page_bytes for name in sending.names)
            self._emit(Offered(sending.transfer.xfer, sending.have))

    def _on_wants(self, sending: Sending, wants: Sequence[link.Want]) -> None:
        for want in wants:
            parts = link.unpack_bits(want.parts) if want.parts else -1
            known, place = sending.wanted.get(want.name), Place(want.grant, want.offset)
            # The receiver starts anew, and knows nothing of what is under way.
            if known is None or not want.epoch or known.place != place:
                if sending in self._by_name.get(want.name, ()):
                    sending.want(want.name, Wanted(want.epoch, parts, place=place))
            elif known.epoch == want.epoch:
                known.missing |= parts
            page = self._index.get(want.name)
            if page is not None:
                self.outbox.line_up(sending, page)
            else:
                self._expect(sending, want.name)
                self._tier.recall([want.name])
        self._wake(sending)

    def _on_revoke(self, origin: str, revoke: link.Revoke) -> None:
        """What is not under way yet is not sent; the link says when the rest is through."""
        for name, grant in revoke.grants:
            for sending in self._by_name.get(name, ()):
                wanted = sending.wanted.get(name)
                if wanted is None or sending.transfer.to != origin or wanted.place.grant != grant:
                    continue
                sending.ready.pop(name, None)
                if wanted.missing:  # it will be wanted anew; else the receiver has all of it
                    sending.forget(name)

    def _on_suspect(self, suspect: link.Suspect) -> None:
        page = self._index.get(suspect.name)
        if page is not None and page.epoch == suspect.epoch and not self._intact(page):
            self._index.condemn(page)

    def _on_arrived(self, sending: Sending) -> None:
        if not sending.delivered:
            sending.delivered = True
            self._emit(Delivered(sending.transfer.xfer))
        if sending.demoted:
            self.end(sending.transfer.xfer)

    # What happens to pages here

    def on_changes(self, changes: Changes, now: float) -> None:
        """New parts are sent on; lost writers are noticed."""
        for name in (*changes.removed, *(name for name, _ in changes.lost)):
            self.keeping.gone(name)
        for name in changes.reserved:
            self.keeping.here(name)
        for page, _ in changes.published:
            for sending in self._by_name.get(page.name, ()):
                sending.absent_since.pop(page.name, None)
                if page.name in sending.wanted:
                    self.outbox.line_up(sending, page)
                    self._wake(sending)
        self._note_lost(changes, now)

    def _note_lost(self, changes: Changes, now: float) -> None:
        died: dict[Sending, list[bytes]] = {}
        for name, was_death in changes.lost:
            for sending in self._by_name.get(name, ()):
                wanted = sending.wanted.get(name)
                if wanted is not None and not wanted.missing:
                    continue
                self._tier.recall([name])
                if was_death and not self._tier.holds(name):
                    died.setdefault(sending, []).append(name)
                else:
                    sending.absent_since.setdefault(name, now)
        for sending, names in died.items():
            self._stalled(sending, names)

    def tick(self, now: float) -> None:
        """Notices what nobody produces any more. Call a few times a second."""
        self.keeping.watch(self._live.values(), now)
        for sending in list(self._live.values()):
            for name in list(sending.absent_since):
                if self._index.get(name) is not None:
                    del sending.absent_since[name]
            stale = [name for name, since in sending.absent_since.items() if now - since >= STALL_SECONDS]
            if stale:
                self._stalled(sending, stale)
            if sending.produced or sending.demoted:
                self._watch_absent(sending, now)
            if sending.demoted and sending.transfer.xfer in self._live:
                self._watch_demoted(sending, now)

    def _stalled(self, sending: Sending, names: list[bytes]) -> None:
        for name in names:
            sending.absent_since.pop(name, None)
        if not sending.delivered:
            order = {name: at for at, name in enumerate(sending.names)}
            self._emit(Stalled(sending.transfer.xfer, sorted(names, key=order.__getitem__)))
            sending.produced = False  # somebody may be about to
        if sending.demoted:
            self._shorten(sending, min(sending.names.index(name) for name in names))

    def _watch_demoted(self, sending: Sending, now: float) -> None:
        """Nobody waits for a demoted transfer, so it must not wait for pages that never come."""
        if sending.sent != sending.sent_before:
            sending.sent_before, sending.moved = sending.sent, now
        lost = sending.link_lost is not None and now - sending.link_lost >= LOST_LINK_SECONDS
        if lost or now - sending.moved >= IDLE_SECONDS:
            self.end(sending.transfer.xfer)

    def _watch_absent(self, sending: Sending, now: float) -> None:
        """Nobody produces pages any more: those that are needed and absent are lost."""
        for name in sending.absent:
            if self._needs(sending, name) and not self._tier.holds(name):
                sending.absent_since.setdefault(name, now)

    def _needs(self, sending: Sending, name: bytes) -> bool:
        if sending.transfer.to is None:  # its addressee is here
            return not self._held.holds(sending.transfer.addressee, name)
        wanted = sending.wanted.get(name)
        return wanted is not None and wanted.missing != 0

    # Bulk

    def next_batch(
        self, to: str, max_bytes: int, now: float, fits: Fits = _fit_always, large: LargeBatch = _never_large,
        urgent_bytes: int = 0,
    ) -> FlyingBatch | None:  # fmt: skip
        """What shall be sent next to `to`, None when there is nothing for which there is room. Its pages are held.

        About `max_bytes`, and as many as `large` says of a transfer beside which no other waits. One of which no more
        than `urgent_bytes` (at least `max_bytes`) is left goes ahead of what has not begun, but where shares are equal.
        """
        peer = self.peers[to]
        urgent_bytes = 0 if peer.schedule.single else max(urgent_bytes, max_bytes)
        waiting = [sending for sending in self._live.values() if sending.ready and sending.transfer.to == to]
        for at, first in enumerate(ordered := peer.schedule.order(waiting, now, peer.rate)):
            urgency = _urgency(first, urgent_bytes)
            if fits(first.transfer.xfer, urgency):
                # Others fill up the batch only if it serves them as soon.
                alike = [other for other in ordered[at:] if _urgency(other, urgent_bytes) == urgency]
                size = max_bytes if len(waiting) > 1 else max(max_bytes, large(self.outbox.ready_bytes(first)))
                batch = self.outbox.next_batch(alike[:1] if peer.schedule.single else alike, size, urgency)
                if batch is not None:  # else its pages were produced anew meanwhile
                    peer.schedule.served(first, batch.payload)
                    return batch
        return None

    def queued(self, to: str, *, background: bool) -> int:
        """Bytes that `to` wants and has not got, of one class of transfers."""
        return sum(s.remaining for s in self._live.values() if s.transfer.to == to and s.background == background)

    def anything_waits(self, to: str) -> bool:
        """Whether something is ready to be sent to `to`."""
        return any(sending.ready for sending in self._live.values() if sending.transfer.to == to)

    # Inside

    def _peer(self, sending: Sending) -> Peer | None:
        return self.peers.get(sending.transfer.to) if sending.transfer.to is not None else None

    def _wake(self, sending: Sending) -> None:
        peer = self._peer(sending)
        if peer is not None and (sending.ready or self.outbox.spent):
            peer.wake()

    def _expect(self, sending: Sending, name: bytes) -> None:
        """Counts a page that is still to be produced among what is left to send."""
        contract, wanted = self._contracts.only(), sending.wanted.get(name)
        if contract is not None and wanted is not None:
            sending.measure(wanted, contract.layout_of(name).part_bytes)

    def _offer(self, sending: Sending) -> None:
        sending.forget_all()
        if (peer := self._peer(sending)) is not None:
            peer.send(
                link.Offer(
                    xfer=sending.transfer.xfer,
                    names=sending.names,
                    tails=0 if sending.demoted else sending.transfer.tails,
                    addressee=sending.transfer.addressee,
                    background=sending.background,
                    contract=self._contracts.only(),
                )
            )
        sending.told_whole = False
        self._tell_whole(sending)

    def _tell_whole(self, sending: Sending) -> None:
        whole, peer = not sending.absent, self._peer(sending)
        if peer is not None and whole != sending.told_whole:
            sending.told_whole = whole
            peer.send(link.Whole(sending.transfer.xfer, whole))

    def _shorten(self, sending: Sending, count: int) -> None:
        gone, sending.names = sending.names[count:], sending.names[:count]
        self._forget(sending, gone)
        if not sending.names or sending.delivered:
            self.end(sending.transfer.xfer)
        elif (peer := self._peer(sending)) is not None:
            peer.send(link.Demoted(sending.transfer.xfer, count))
            self._tell_whole(sending)

    def _forget(self, sending: Sending, names: list[bytes]) -> None:
        for name in names:
            sending.forget(name)
            sending.absent_since.pop(name, None)
            sending.absent.discard(name)
            sendings = self._by_name[name]
            sendings.discard(sending)
            if not sendings:
                del self._by_name[name]
        self._index.unpin(sending.owner, names)

    def _tell_state(self, sending: Sending) -> None:
        if sending.have is not None:
            self._emit(Offered(sending.transfer.xfer, sending.have))
        if sending.delivered:
            self._emit(Delivered(sending.transfer.xfer))


def _urgency(sending: Sending, urgent_bytes: int) -> int:
    """See FlyingBatch."""
    if sending.background:
        return 2
    return int(sending.remaining > urgent_bytes)
