"""A fleet's own certificate authority: `ca.pem` and one `<name>.pem`, `<name>.key` for each part.

Keys are ECDSA P-256. A leaf may serve and connect (serverAuth, clientAuth), and is valid for its own name, localhost
and the hosts it was asked for. Every file has mode 0600, the directory 0700.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdrelay.errors import ConfigError

CA_DAYS = 3650
LEAF_DAYS = 825
RENEW_DAYS = 30
"""A leaf that ends within this many days is issued anew."""

_CLOCK_SKEW = timedelta(hours=1)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Authority(NamedTuple):
    """The certificate authority in memory."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class Written(NamedTuple):
    """What one call wrote and what it left as it was: names of authority ("ca"), leaves and "fleet.key"."""

    created: list[str]
    kept: list[str]


def ensure(directory: Path, names: Iterable[str], hosts: Sequence[str] = (), rotate: bool = False) -> Written:
    """Makes `directory` hold an authority, a leaf for each of `names` valid for `hosts`, and the fleet key.

    What is there and still good stays; `rotate` issues the leaves anew under the same authority.
    Raises ConfigError when a name cannot be a file name or a file there cannot be read.
    """
    leaves = list(dict.fromkeys(names))
    for name in leaves:
        _check_name(name)
    _make_directory(directory)
    written = Written([], [])
    authority = _ensure_authority(directory, written)
    for name in leaves:
        wanted = _subject_names((name, *_LOCAL_HOSTS, *hosts))
        if not rotate and _is_good(directory, name, wanted, authority):
            written.kept.append(name)
        else:
            _issue(directory, name, wanted, authority)
            written.created.append(name)
    _ensure_fleet_key(directory / "fleet.key", written)
    return written


def renew_authority(directory: Path) -> None:
    """Puts a new authority before the present one: both are trusted, the new one issues. `retire_authorities` ends it.

    Raises ConfigError when there is none yet, or a change is under way already.
    """
    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    _read_authority(certificate_path, key_path)
    trusted = _authorities(directory)
    if len(trusted) > 1:
        raise ConfigError(f"{certificate_path}: a change of authority is under way; end it with --retire-authority")
    authority = _new_authority()
    write_private(certificate_path, b"".join(map(_certificate_pem, (authority.certificate, *trusted))))
    write_private(key_path, _key_pem(authority.key))


def retire_authorities(directory: Path) -> list[str]:
    """Trusts the issuing authority only. Raises ConfigError naming leaves here that it did not issue."""
    issuing = _read_authority(directory / "ca.pem", directory / "ca.key")
    late = [leaf.name for leaf in expiries(directory) if leaf.name != "ca" and leaf.authority != _name_of(issuing[0])]
    if late:
        raise ConfigError(f"{directory}: {', '.join(late)}: of the former authority; run --rotate for them first")
    former = _authorities(directory)[1:]
    write_private(directory / "ca.pem", _certificate_pem(issuing.certificate))
    return [_name_of(certificate) for certificate in former]


class Expiry(NamedTuple):
    """When a certificate ends."""

    name: str  # of the part, or "ca"
    ends: datetime
    authority: str  # who issued it

    def seconds(self, now: datetime | None = None) -> float:
        """Until then; negative afterwards."""
        return (self.ends - (now or datetime.now(UTC))).total_seconds()


def expiries(directory: Path) -> list[Expiry]:
    """All certificates in `directory`, the trusted authorities first. Raises ConfigError for what is not one."""
    found = [Expiry("ca", one.not_valid_after_utc, _name_of(one)) for one in _authorities(directory)]
    return found + [expiry_of(path) for path in sorted(directory.glob("*.pem")) if path.name != "ca.pem"]


def expiry_of(path: Path) -> Expiry:
    """When the certificate in `path` ends. Raises ConfigError."""
    try:
        leaf = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the certificate cannot be read: {error}") from error
    return Expiry(path.stem, leaf.not_valid_after_utc, _text_of(leaf.issuer))


def _authorities(directory: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / 'ca.pem'}: the authority cannot be read: {error}") from error


def _name_of(certificate: x509.Certificate) -> str:
    return _text_of(certificate.subject)


def _text_of(name: x509.Name) -> str:
    return str(name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _ensure_authority(directory: Path, written: Written) -> Authority:
    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    if certificate_path.exists() and key_path.exists():
        written.kept.append("ca")
        return _read_authority(certificate_path, key_path)
    if certificate_path.exists():
        raise ConfigError(f"{key_path}: missing; leaves can only be issued where the authority's key is")
    authority = _new_authority()
    write_private(key_path, _key_pem(authority.key))
    write_private(certificate_path, _certificate_pem(authority.certificate))
    written.created.append("ca")
    return authority


def _read_authority(certificate_path: Path, key_path: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{certificate_path}: the authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{key_path}: not the key of {certificate_path.name}")
    return Authority(certificate, key)


def _new_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # A number in the name keeps the authorities of two fleets apart in error messages.
    name = _common_name(f"pdrelay fleet {secrets.token_hex(4)}")
    builder = _builder(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def _issue(directory: Path, name: str, subject_names: list[x509.GeneralName], authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_common_name(name), authority.certificate.subject, key.public_key(), LEAF_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(subject_names), critical=False)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer_id, critical=False)
    write_private(directory / f"{name}.key", _key_pem(key))
    write_private(directory / f"{name}.pem", _certificate_pem(builder.sign(authority.key, hashes.SHA256())))


def _is_good(directory: Path, name: str, wanted: list[x509.GeneralName], authority: Authority) -> bool:
    """Whether leaf and key are there, come from this authority, cover `wanted` and do not end soon."""
    try:
        leaf = x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())
        key = serialization.load_pem_private_key((directory / f"{name}.key").read_bytes(), None)
        _verify_issued(leaf, _authorities(directory), authority)
        held = set(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != leaf.public_key():
        return False
    return held.issuperset(wanted) and leaf.not_valid_after_utc > datetime.now(UTC) + timedelta(days=RENEW_DAYS)


def _verify_issued(leaf: x509.Certificate, trusted: Sequence[x509.Certificate], authority: Authority) -> None:
    """Raises ValueError or InvalidSignature unless one of the `trusted` authorities has issued `leaf`."""
    for certificate in trusted:
        if certificate.subject == leaf.issuer:
            leaf.verify_directly_issued_by(certificate)
            return
    leaf.verify_directly_issued_by(authority.certificate)


def _ensure_fleet_key(path: Path, written: Written) -> None:
    if path.exists():
        written.kept.append(path.name)
    else:
        write_private(path, secrets.token_hex(32).encode() + b"\n")
        written.created.append(path.name)


def write_private(path: Path, data: bytes) -> None:
    """Puts `data` into a file that only its owner can read.

    One that is there is written over: who watches it (vLLM does) would lose sight of a file that takes its place. Who
    reads it in between finds something that is no certificate, keeps the former one and looks again.
    """
    if path.is_file():
        path.chmod(0o600)
        with path.open("r+b", buffering=0) as file:
            file.write(data)
            file.truncate()
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    draft.replace(path)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from error


def _check_name(name: str) -> None:
    if not name or name == "ca" or name.startswith(".") or any(char in name for char in "/\\\0") or not name.isascii():
        raise ConfigError(f"certificate name: found {name!r}, expected the name of a part, such as p-0 or host-a")


def _subject_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    return [_subject_name(host) for host in dict.fromkeys(hosts)]


def _subject_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"certificate host: found {host!r}, expected a host name or an IP address") from error


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
