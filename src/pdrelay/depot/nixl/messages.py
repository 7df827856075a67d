"""What a depot and the process of a NIXL agent say to each other: frames of `depot/wire.py` over a socket pair."""

from __future__ import annotations

import msgspec

from pdrelay.depot import wire
from pdrelay.depot.link_messages import Endpoint
from pdrelay.depot.nixl.base import Piece


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """First message to the process."""

    name: str  # of the agent; no two agents of a fleet ever share one
    backend: str
    params: dict[str, str]  # of the backend


class Connect(msgspec.Struct, frozen=True, tag="connect", array_like=True):
    """Connect to the agent at `far`; answered by `Connected`."""

    far: Endpoint


class Write(msgspec.Struct, frozen=True, tag="write", array_like=True):
    """See Agent.write; answered by `Written`."""

    batch: int
    pieces: list[Piece]
    note: bytes


class Notify(msgspec.Struct, frozen=True, tag="notify", array_like=True):
    """See Agent.notify."""

    note: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """First message from the process: the arena is registered."""

    endpoint: Endpoint


class Connected(msgspec.Struct, frozen=True, tag="connected", array_like=True):
    """A first write has arrived there."""


class Written(msgspec.Struct, frozen=True, tag="written", array_like=True):
    """See AgentListener.written."""

    batch: int


class Notified(msgspec.Struct, frozen=True, tag="notified", array_like=True):
    """See AgentListener.notified."""

    note: bytes


class Broken(msgspec.Struct, frozen=True, tag="broken", array_like=True):
    """Last message from the process: what is wrong, and how to put it right where that is known."""

    detail: str


ToAgent = Start | Connect | Write | Notify
FromAgent = Ready | Connected | Written | Notified | Broken

_to_agent = msgspec.msgpack.Decoder(ToAgent)
_from_agent = msgspec.msgpack.Decoder(FromAgent)


def decode_to_agent(body: bytes | memoryview) -> ToAgent:
    """A depot's message. Raises ProtocolError."""
    return wire.decoded(_to_agent, body)


def decode_from_agent(body: bytes | memoryview) -> FromAgent:
    """An agent's message. Raises ProtocolError."""
    return wire.decoded(_from_agent, body)
