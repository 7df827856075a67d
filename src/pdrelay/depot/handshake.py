"""How two depots convince each other."""

from __future__ import annotations

from pdrelay.depot import link_messages as link
from pdrelay.depot.hub import Hub
from pdrelay.errors import ProtocolError


def hello_of(hub: Hub) -> link.LinkHello:
    """What a depot says of itself."""
    return link.LinkHello(depot=hub.name, key_check=hub.key_check, contracts=hub.own_contracts)


def check_hello(hub: Hub, hello: link.LinkHello) -> None:
    """Raises ProtocolError when the other depot speaks another version or belongs to another fleet."""
    if hello.version != link.VERSION:
        raise ProtocolError(f"link protocol version {link.VERSION} here, {hello.version} there")
    if hello.key_check != hub.key_check:
        raise ProtocolError(f"the fleet key of depot {hello.depot} differs from that of {hub.name}")
