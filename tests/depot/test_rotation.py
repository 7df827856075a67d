"""Certificates change under running parts: new connections use the new ones."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from depot_kit import until
from link_kit import World

from pdrelay.cluster import certs
from pdrelay.cluster.tls import FleetContext, client_context, server_context
from pdrelay.depot.base import DepotControl
from pdrelay.depot.metrics import render
from pdrelay.errors import ConfigError

PARTS = ["p", "d", "gateway"]


def serial(server: FleetContext, client: FleetContext) -> str:
    """The serial number of the server's certificate. Raises OSError when either side refuses."""
    ours, theirs = socket.socketpair()
    failed: list[OSError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as sock:
                sock.sendall(b"x")
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname="d") as sock:
            sock.recv(1)
            certificate = sock.getpeercert() or {}
    finally:
        ours.close()
        thread.join(10)
        theirs.close()
    if failed:
        raise failed[0]
    return str(certificate["serialNumber"])


def test_a_context_follows_its_files_and_keeps_the_former_while_they_do_not_fit(tmp_path: Path) -> None:
    certs.ensure(tmp_path, PARTS)
    server, client = server_context(tmp_path, "d"), client_context(tmp_path, "p")
    first = serial(server, client)
    certs.ensure(tmp_path, PARTS, rotate=True)
    second = serial(server, client)
    assert first != second
    key = (tmp_path / "d.key").read_bytes()
    (tmp_path / "d.key").write_bytes((tmp_path / "p.key").read_bytes())
    assert serial(server, client) == second
    (tmp_path / "d.key").write_bytes(key)
    assert serial(server, client) == second


def test_the_authority_changes_with_an_overlap(tmp_path: Path) -> None:
    certs.ensure(tmp_path, PARTS)
    server, client = server_context(tmp_path, "d"), client_context(tmp_path, "p")
    first = serial(server, client)
    certs.renew_authority(tmp_path)
    assert serial(server, client) == first, "both authorities are trusted"
    with pytest.raises(ConfigError, match="change of authority is under way"):
        certs.renew_authority(tmp_path)
    certs.ensure(tmp_path, ["d"], rotate=True)
    assert serial(server, client) != first, "one side has a certificate of each"
    with pytest.raises(ConfigError, match="gateway, p: of the former authority"):
        certs.retire_authorities(tmp_path)
    stranger = tmp_path / "former"
    stranger.mkdir()
    for name in ("ca.pem", "p.pem", "p.key"):
        (stranger / name).write_bytes((tmp_path / name).read_bytes())
    former = client_context(stranger, "p")
    certs.ensure(tmp_path, PARTS, rotate=True)
    assert serial(server, former)
    assert len(certs.retire_authorities(tmp_path)) == 1
    assert serial(server, client)
    with pytest.raises(OSError, match=r"(?i)unknown ca"):
        serial(server, former)


async def test_parts_whose_certificates_expired_come_back_when_they_are_rotated(
    tmp_path_factory: pytest.TempPathFactory, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tls = tmp_path_factory.mktemp("short")
    monkeypatch.setattr(certs, "LEAF_DAYS", 4 / 86400)
    certs.ensure(world.tls, PARTS)
    p, d, line = await world.joined()
    control: DepotControl = await d.control()
    ends = min(expiry.ends for expiry in certs.expiries(world.tls) if expiry.name != "ca")
    await until(lambda: datetime.now(UTC) > ends)
    assert "pdrelay_depot_certificate_expiry_seconds" in render(d.hub, world.tls / "d.pem")
    assert certs.expiry_of(world.tls / "d.pem").seconds() < 0
    assert p.hub.links.up() == {"d": True}, "what is up stays up"
    line.cut()
    for connection in list(d.listener._connections.open):
        connection.close()
    await until(lambda: p.hub.links.up() == {"d": False} and control.trouble != "")
    details = []
    p.hub.subscribe(lambda event: details.append(getattr(event, "detail", "")))
    await until(lambda: any("certificate" in detail for detail in details) or "certificate" in control.trouble)
    monkeypatch.undo()
    certs.ensure(world.tls, PARTS, rotate=True)
    await until(lambda: p.hub.links.up() == {"d": True} and control.trouble == "", 20)


def test_the_context_of_an_event_loop_is_the_present_one_too(tmp_path: Path) -> None:
    certs.ensure(tmp_path, PARTS)
    context = server_context(tmp_path, "d")

    async def served() -> str:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            _, writer = await asyncio.open_connection(
                host, port, ssl=client_context(tmp_path, "p"), server_hostname="d"
            )
            certificate = writer.get_extra_info("peercert")
            writer.close()
            return str(certificate["serialNumber"])

    first = asyncio.run(served())
    certs.ensure(tmp_path, PARTS, rotate=True)
    assert asyncio.run(served()) != first
    assert isinstance(context, ssl.SSLContext)
