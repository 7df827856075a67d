"""A connection from a depot that sends to this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from secrets import token_bytes

from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.bulk_receiver import BulkReceiver
from pdrelay.depot.channel import SECRET_BYTES
from pdrelay.depot.handshake import Terms, check_hello, hello_of
from pdrelay.depot.hub import Hub
from pdrelay.depot.inbox import Landed
from pdrelay.depot.nixl.base import MakeAgent
from pdrelay.depot.nixl.landing import Conversation, Landing
from pdrelay.depot.sessions import Write
from pdrelay.errors import DepotError, ProtocolError

BreakOff = Callable[[], None]
MAX_SECRETS = 1024
"""Not used up, of one link."""


@dataclass(slots=True)
class Peers:
    """What a listener knows of the depots that send to it."""

    agents: Mapping[str, MakeAgent]  # of those that write by NIXL
    checkers: Executor  # verify what they wrote
    clear: frozenset[str] = frozenset()  # those that send KV without TLS
    sessions: dict[str, LinkSession] = field(default_factory=dict)  # present ones
    landings: dict[str, Landing] = field(default_factory=dict)  # last ones, of former sessions too


class LinkSession:
    """The receiving end of a link: its control messages, and what its bulk connections bring."""

    def __init__(self, hub: Hub, hello: link.LinkHello, write: Write, peers: Peers, break_off: BreakOff) -> None:
        """Raises ContractError, ProtocolError. `break_off` closes the connection."""
        make_agent = peers.agents.get(hello.depot)
        self._decoder = hub.codecs.decoder(hello.depot)
        self._terms = Terms(
            codec=self._decoder.name,
            transport="tcp" if make_agent is None else "nixl",
            encryption="control" if hello.depot in peers.clear else "tls",
        )
        check_hello(hub, hello, self._terms)
        self._decoder.require_fit(hello.contracts)
        self._hub, self._peer, self._write, self._sessions = hub, hello.depot, write, peers.sessions
        self._close_connection = break_off
        self._holder = f"peer:{hello.depot}"
        self._bulk: set[BulkReceiver] = set()
        self._secrets: dict[bytes, None] = {}  # that open bulk connections, once each
        self._stats: link.Stats | None = None  # as last told
        self._acks: list[int] = []  # batches that were read and are not acknowledged yet
        sessions = peers.sessions
        if (former := sessions.get(self._peer)) is not None:
            former.close()
        hub.peer_contracts(self._holder, hello.contracts)
        sessions[self._peer] = self
        self.send(hello_of(hub, self._terms))
        hub.on_contracts[id(self)] = lambda: self.send(link.Contracts(hub.own_contracts))
        self._landing = self._land(make_agent, peers) if make_agent is not None else None
        if self._landing is None:
            hub.receivers.peer_up(self._peer, self.send)

    def _land(self, make_agent: MakeAgent, peers: Peers) -> Landing:
        conversation = Conversation(self._on_endpoint, self.on_batch, self._settle, self._break_off)
        former = peers.landings.get(self._peer)
        landing = Landing(self._hub, self._peer, make_agent, peers.checkers, conversation, former)
        peers.landings[self._peer] = landing
        return landing

    def _on_endpoint(self, endpoint: link.Endpoint) -> None:
        """The peer may write: only now there is something to offer it."""
        self._hub.receivers.peer_up(self._peer, self.send)
        self.send(endpoint)

    def _settle(self) -> None:
        self.send_acks()
        self._hub.settle()

    def _break_off(self, detail: str) -> None:
        self._write(wire.failure(0, DepotError(detail)))
        self._close_connection()

    @property
    def takes_tls(self) -> bool:
        """Whether the peer shall bring KV over bulk connections with TLS."""
        return self._landing is None and self._terms.encryption == "tls"

    def redeem(self, secret: bytes) -> bool:
        """Whether `secret` opens a bulk connection in clear; it does so once."""
        return self._secrets.pop(secret, secret) is None

    def tell_stats(self) -> None:
        """Tells the peer how things are here, when that changed. Call about once a second."""
        stats = self._hub.receivers.stats_for(self._peer)
        if stats != self._stats:
            self._stats = stats
            self.send(stats)

    def send(self, message: link.LinkMessage) -> None:
        """Sends a control message, after the acknowledgements that are due."""
        self.send_acks()
        self._write(wire.frame(message))

    def send_acks(self) -> None:
        """Says which batches were read."""
        if self._acks:
            batches, self._acks = self._acks, []
            self._write(wire.frame(link.Ack(batches)))

    def handle(self, body: bytes, write: Write) -> None:
        """Takes one message. Raises ContractError, ProtocolError."""
        if self._sessions.get(self._peer) is not self:
            return
        message = link.decode(body)
        if isinstance(message, link.Contracts):
            self._decoder.require_fit(message.contracts)
            self._hub.peer_contracts(self._holder, message.contracts)
        elif isinstance(message, link.Ping):
            self.send(message)
        elif isinstance(message, link.AskSecrets):
            self._give_secrets(message.count)
        else:
            self._hub.receivers.on_message(self._peer, message)
        self._hub.settle()

    def _give_secrets(self, count: int) -> None:
        if self._terms.encryption != "control" or not 0 < count <= MAX_SECRETS:
            raise ProtocolError(f"{count} secrets asked for on a link with encryption {self._terms.encryption!r}")
        fresh = [token_bytes(SECRET_BYTES) for _ in range(count)]
        self._secrets |= dict.fromkeys(fresh)
        while len(self._secrets) > MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]
        self.send(link.Secrets(fresh))

    def close(self) -> None:
        """The connection closed, or another of the same depot took its place."""
        if self._sessions.get(self._peer) is not self:
            return
        del self._sessions[self._peer]
        for receiver in self._bulk:
            receiver.stop()
        if self._landing is not None:
            self._landing.close()
        self._hub.on_contracts.pop(id(self), None)
        self._hub.contracts.leave(self._holder)
        self._hub.receivers.peer_down(self._peer, self._hub.clock())
        self._hub.settle()

    def adopt(self, receiver: BulkReceiver) -> None:
        """A bulk connection of this link."""
        self._bulk.add(receiver)

    def drop(self, receiver: BulkReceiver) -> None:
        """A bulk connection ended."""
        self._bulk.discard(receiver)

    def on_batch(self, number: int | None, landed: list[Landed]) -> None:
        """What a bulk connection received; `number` is None when it broke in the middle. `send_acks` must follow."""
        if number is not None:
            self._acks.append(number)  # goes out before what is wanted again, which must not count as under way
        self._hub.receivers.landed(landed)
