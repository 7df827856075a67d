"""How two depots convince each other."""

from __future__ import annotations

from typing import NamedTuple

from pdrelay.cluster.topology import CodecName, Encryption
from pdrelay.depot import link_messages as link
from pdrelay.depot.hub import Hub
from pdrelay.errors import ContractError, ProtocolError


class Terms(NamedTuple):
    """What both ends must have configured alike for a link, by the names of its keys in the deployment file."""

    codec: CodecName
    transport: link.Transport
    encryption: Encryption = "tls"


def hello_of(hub: Hub, terms: Terms) -> link.LinkHello:
    """What a depot says of itself, and of how the link is configured."""
    return link.LinkHello(depot=hub.name, key_check=hub.key_check, contracts=hub.own_contracts, **terms._asdict())


def check_hello(hub: Hub, hello: link.LinkHello, terms: Terms) -> None:
    """Raises ProtocolError when the other depot belongs to another fleet, ContractError when it has the link
    configured otherwise."""
    if hello.key_check != hub.key_check:
        raise ProtocolError(f"the fleet key of depot {hello.depot} differs from that of {hub.name}")
    for key, ours in terms._asdict().items():
        if (theirs := getattr(hello, key)) != ours:
            raise ContractError(f"link.{key}", ours, theirs)
