"""How two depots convince each other."""

from __future__ import annotations

from pdrelay.cluster.topology import CodecName
from pdrelay.depot import link_messages as link
from pdrelay.depot.hub import Hub
from pdrelay.errors import ContractError, ProtocolError


def hello_of(hub: Hub, codec: CodecName, transport: link.Transport) -> link.LinkHello:
    """What a depot says of itself, and of how the link is configured."""
    return link.LinkHello(
        depot=hub.name, key_check=hub.key_check, contracts=hub.own_contracts, codec=codec, transport=transport
    )


def check_hello(hub: Hub, hello: link.LinkHello, codec: CodecName, transport: link.Transport) -> None:
    """Raises ProtocolError when the other depot belongs to another fleet, ContractError when it has the link
    configured otherwise."""
    if hello.key_check != hub.key_check:
        raise ProtocolError(f"the fleet key of depot {hello.depot} differs from that of {hub.name}")
    if hello.codec != codec:
        raise ContractError("link.codec", codec, hello.codec)
    if hello.transport != transport:
        raise ContractError("link.transport", transport, hello.transport)
