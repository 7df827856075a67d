"""TLS contexts of a fleet: both sides always verify. Files are those of `pdrelay certs`."""

from __future__ import annotations

import ssl
from pathlib import Path

from pdrelay.errors import ConfigError


def client_context(directory: str | Path, name: str) -> ssl.SSLContext:
    """The context with which part `name` connects. Raises ConfigError naming the file that is missing or broken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return _load(context, Path(directory), name)


def server_context(directory: str | Path, name: str) -> ssl.SSLContext:
    """The context with which part `name` listens; only certificates of the fleet's authority are let in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, Path(directory), name)


def _load(context: ssl.SSLContext, directory: Path, name: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    authority, certificate, key = (directory / file for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
    for path in (authority, certificate, key):
        if not path.is_file():
            raise ConfigError(f"{path}: found nothing, expected a file made by `pdrelay certs`")
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{directory}: certificate of {name!r} cannot be used: {error}") from error
    return context
