"""Certificates: what `ssl` accepts and refuses, what a further run keeps."""

import json
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdrelay.cli.main import main
from pdrelay.cluster import certs
from pdrelay.errors import ConfigError


def server_context(directory: Path, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=directory / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
    return context


def client_context(directory: Path, name: str | None, trusted: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted / "ca.pem")
    if name is not None:
        context.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
    return context


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, hostname: str) -> str:
    """The client's certified name as the server sees it. Raises OSError (ssl.SSLError) when either side refuses."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    outcome: list[str | OSError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as secured:
                outcome.append(dict(pair[0] for pair in secured.getpeercert()["subject"])["commonName"])
                secured.sendall(b"x")
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=hostname) as secured:
            secured.recv(1)
    finally:
        ours.close()
        thread.join()
        theirs.close()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


@pytest.mark.parametrize("hostname", ["host-a", "localhost", "127.0.0.1", "::1", "10.1.2.3", "a.example"])
def test_both_sides_verify_for_every_name(tmp_path, hostname):
    certs.ensure(tmp_path, ["host-a", "p-0"], ["10.1.2.3", "a.example"])
    server = server_context(tmp_path, "host-a")
    assert handshake(server, client_context(tmp_path, "p-0", tmp_path), hostname) == "p-0"


def test_strict_verification_accepts_the_chain(tmp_path):
    certs.ensure(tmp_path, ["host-a", "p-0"])
    server, client = server_context(tmp_path, "host-a"), client_context(tmp_path, "p-0", tmp_path)
    server.verify_flags |= ssl.VERIFY_X509_STRICT
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert handshake(server, client, "localhost") == "p-0"


def test_other_host_other_authority_and_no_certificate_are_refused(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    certs.ensure(ours, ["host-a", "p-0"])
    certs.ensure(theirs, ["p-0"])
    server = server_context(ours, "host-a")
    for client, hostname in [
        (client_context(ours, "p-0", ours), "elsewhere.example"),
        (client_context(theirs, "p-0", ours), "localhost"),
        (client_context(ours, "p-0", theirs), "localhost"),
        (client_context(ours, None, ours), "localhost"),
    ]:
        with pytest.raises(OSError):  # noqa: PT011 - the refused side sees an SSL alert or a reset
            handshake(server, client, hostname)


def test_a_further_run_keeps_what_is_there_and_adds_what_is_missing(tmp_path):
    first = certs.ensure(tmp_path, ["p-0"])
    assert first.created == ["ca", "p-0", "fleet.key"]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = certs.ensure(tmp_path, ["p-0", "md-0"])
    assert (second.created, second.kept) == (["md-0"], ["ca", "p-0", "fleet.key"])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert handshake(server_context(tmp_path, "md-0"), client_context(tmp_path, "p-0", tmp_path), "md-0") == "p-0"


def test_rotate_issues_leaves_anew_under_the_same_authority(tmp_path):
    certs.ensure(tmp_path, ["p-0"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert certs.ensure(tmp_path, ["p-0"], rotate=True).created == ["p-0"]
    changed = {name for name, data in before.items() if (tmp_path / name).read_bytes() != data}
    assert changed == {"p-0.pem", "p-0.key"}


def test_a_new_host_or_a_lost_key_replaces_the_leaf(tmp_path):
    certs.ensure(tmp_path, ["p-0", "md-0"])
    (tmp_path / "md-0.key").unlink()
    assert certs.ensure(tmp_path, ["p-0", "md-0"]).created == ["md-0"]
    assert certs.ensure(tmp_path, ["p-0"], ["10.0.0.9"]).created == ["p-0"]


def test_files_are_private(tmp_path):
    certs.ensure(tmp_path / "tls", ["p-0"])
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()} == {0o600}
    assert len(bytes.fromhex((tmp_path / "tls" / "fleet.key").read_text().strip())) == 32


@pytest.mark.parametrize("name", ["", "ca", "../x", "a/b", ".hidden"])
def test_bad_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="certificate name"):
        certs.ensure(tmp_path, [name])


def test_an_authority_without_its_key_cannot_issue(tmp_path):
    certs.ensure(tmp_path, ["p-0"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key: missing"):
        certs.ensure(tmp_path, ["md-0"])


def test_the_command(tmp_path):
    result = CliRunner().invoke(main, ["certs", "--dir", str(tmp_path), "--name", "p-0", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["created"] == ["ca", "p-0", "fleet.key"]
    result = CliRunner().invoke(main, ["certs", "--dir", str(tmp_path), "--name", "../p"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pdrelay: certificate name")
    assert result.stderr.count("\n") == 1
