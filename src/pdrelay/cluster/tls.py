"""TLS contexts of a fleet: both sides always verify. Files are those of `pdrelay certs`.

A context follows its files: what is connected or accepted after `pdrelay certs --rotate` uses the new ones, and trusts
no authority that `ca.pem` does not hold any more. Connections that are up stay as they are.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from pdrelay.errors import ConfigError

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


class FleetContext(ssl.SSLContext):
    """A context that reads its files again when they change. Whoever makes connections with it need not know."""

    # `SSLContext` takes its protocol in `__new__` and has no `__init__` of its own.
    def __new__(cls, protocol: int, directory: Path, name: str) -> FleetContext:
        """Raises ConfigError naming the file that is missing or broken."""
        context = super().__new__(cls, protocol)
        context._protocol, context._directory, context._name = protocol, directory, name
        context._stamp = context._stamped()
        context._present = context._load()
        return context

    _protocol: int
    _directory: Path
    _name: str
    _stamp: Stamp
    _present: ssl.SSLContext

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """See ssl.SSLContext."""
        return self._current().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """See ssl.SSLContext."""
        return self._current().wrap_bio(*arguments, **options)

    @property
    def files(self) -> tuple[Path, Path, Path]:
        """Those of the authority, the certificate and its key."""
        return self._directory / "ca.pem", self._directory / f"{self._name}.pem", self._directory / f"{self._name}.key"

    def _current(self) -> ssl.SSLContext:
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._present, self._stamp = self._load(), stamp
                logger.info("certificate of %s read anew", self._name)
        except ConfigError as error:  # half-way through being replaced: the next connection looks again
            logger.warning("the former certificate of %s stays in use: %s", self._name, error)
        return self._present

    def _stamped(self) -> Stamp:
        try:
            found = [path.stat() for path in self.files]
        except OSError as error:
            raise ConfigError(f"{error.filename}: found nothing, expected a file made by `pdrelay certs`") from error
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self._protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if self._protocol == ssl.PROTOCOL_TLS_SERVER:
            # Clients of bulk connections never read: a session ticket would break the connection at its end.
            context.num_tickets = 0
        authority, certificate, key = self.files
        try:
            context.load_verify_locations(authority)
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self._directory}: certificate of {self._name!r} cannot be used: {error}") from error
        return context


def client_context(directory: str | Path, name: str) -> FleetContext:
    """The context with which part `name` connects. Raises ConfigError naming the file that is missing or broken."""
    return FleetContext(ssl.PROTOCOL_TLS_CLIENT, Path(directory), name)


def server_context(directory: str | Path, name: str) -> FleetContext:
    """The context with which part `name` listens; only certificates of the fleet's authority are let in."""
    return FleetContext(ssl.PROTOCOL_TLS_SERVER, Path(directory), name)
