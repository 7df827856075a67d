"""Both sides say the versions they speak; the highest common one is spoken, or both ranges are in the error."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from depot_kit import RunningDepot, contract, until
from hypothesis import given
from hypothesis import strategies as st
from link_kit import World

from pdrelay.cluster.tls import client_context
from pdrelay.depot import link_messages, wire
from pdrelay.depot.control_client import control_over_unix
from pdrelay.depot.engine_client import connect_engine
from pdrelay.depot.sockets import dial_control, read_frame
from pdrelay.errors import DepotUnavailableError, ProtocolError
from pdrelay.versions import Versions, agree

ranges = st.tuples(st.integers(1, 9), st.integers(0, 5)).map(lambda at: Versions(at[0], at[0] + at[1]))


@given(ranges, ranges)
def test_both_sides_come_to_the_same_version_or_refuse_with_both_ranges(ours: Versions, theirs: Versions) -> None:
    common = set(range(ours.low, ours.high + 1)) & set(range(theirs.low, theirs.high + 1))
    if common:
        assert agree("p", ours, theirs, "x") == agree("p", theirs, ours, "y") == max(common)
    else:
        with pytest.raises(ProtocolError, match=f"we speak {ours}, x speaks {theirs}"):
            agree("p", ours, theirs, "x")


def later(message: msgspec.Struct, versions: object) -> bytes:
    """The frame of a hello whose version has other fields than ours, after the versions."""
    tag = msgspec.msgpack.decode(msgspec.msgpack.encode(message))[0]
    body = msgspec.msgpack.encode([tag, versions, {"quite": "another"}, 5])
    return wire.HEADER.pack(len(body)) + body


HELLOS = {
    "a gateway": wire.Hello(kind="control", name="g", epoch="1"),
    "a depot": link_messages.LinkHello(depot="p", key_check=b"", contracts=[]),
}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=list(HELLOS))
@pytest.mark.parametrize(("versions", "said"), [([7, 9], "versions 7 to 9"), (1, "version 1")])
async def test_a_hello_of_other_versions_is_answered_with_both_ranges(
    world: World, hello: msgspec.Struct, versions: object, said: str
) -> None:
    d = await world.site("d")
    tls = client_context(world.tls, "p")
    reader, writer = await dial_control(f"127.0.0.1:{d.listener.port}", tls, "d")
    writer.write(later(hello, versions))
    failure = msgspec.msgpack.decode(await read_frame(reader), type=wire.Failure)
    assert (failure.call, failure.error) == (0, "ProtocolError")
    assert f"we speak {wire.VERSIONS}" in failure.args[0]
    assert f"speaks {said}" in failure.args[0]
    writer.close()


async def test_who_dials_says_why_there_is_no_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = await world.site("p"), await world.site("d")
    monkeypatch.setattr(link_messages, "VERSIONS", Versions(8, 9))
    details: list[str] = []
    p.hub.subscribe(lambda event: details.append(getattr(event, "detail", "")))
    p.link("d", f"127.0.0.1:{d.listener.port}")  # says 2: the default was made when the module was
    await until(lambda: any("we speak versions 8 to 9" in detail for detail in details))


async def test_engines_and_clients_refuse_a_depot_of_another_version(
    depot: RunningDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdrelay.depot.server.wire.VERSIONS", Versions(5, 6))
    client = control_over_unix(str(depot.socket_path))
    with pytest.raises(DepotUnavailableError, match="we speak versions 5 to 6, the client speaks version 2"):
        await client.ready(0.5)
    await client.aclose()
    with pytest.raises(ProtocolError, match="the client speaks version 2"):
        await asyncio.to_thread(connect_engine, depot.socket_path, "e", contract())
