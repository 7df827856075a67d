"""A small engine: publishes pages at its host's depot and checks what arrived at another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pdrelay.depot.base import PageKind, Part
from pdrelay.depot.engine_client import SocketEngineDepot, connect_engine
from pdrelay.kv.contract import KVContract
from pdrelay.kv.names import NAME_BYTES

NAMES_AT_ONCE = 64


class Template(NamedTuple):
    """Bytes of one page and the checksums of its parts."""

    data: bytes
    checksums: list[int]


def template_of(contract: KVContract) -> Template:
    """Random bytes in the shape of a page."""
    data = os.urandom(contract.page_bytes)
    size = contract.layouts[0].part_bytes
    return Template(data, [xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)])


def fresh_names(count: int) -> list[bytes]:
    """Names that no depot has."""
    return [os.urandom(NAME_BYTES) for _ in range(count)]


class Producer:
    """One engine connection, of one KV group. Blocking.

    Every page holds the same random bytes, but for its name at the start.
    """

    def __init__(self, socket: Path, instance: str, contract: KVContract, template: Template) -> None:
        """Connects. Raises DepotUnavailableError, ContractError."""
        self._part_bytes, self._template = contract.layouts[0].part_bytes, template
        assert self._part_bytes >= NAME_BYTES
        self._depot: SocketEngineDepot = connect_engine(socket, instance, contract)

    def publish(self, owner: str, names: Sequence[bytes]) -> None:
        """Writes and publishes whole pages, and returns when the depot has them; they may be evicted once `owner` is
        released and nothing else pins them. Raises ArenaFullError, DepotUnavailableError."""
        for start in range(0, len(names), NAMES_AT_ONCE):
            some = names[start : start + NAMES_AT_ONCE]
            offsets = self._depot.reserve(owner, some, [PageKind.PREFIX] * len(some))
            parts: list[Part] = []
            for name, offset in zip(some, offsets, strict=True):
                if offset is not None:
                    parts += self._write(name, offset)
            self._depot.publish(owner, parts)
        self._depot.match(names[-1:])  # publishing has no answer; this call has one, and comes after

    def _write(self, name: bytes, offset: int) -> list[Part]:
        arena, (data, checksums) = self._depot.arena, self._template
        arena[offset : offset + len(data)] = data
        arena[offset : offset + NAME_BYTES] = name
        first = xxh3_64_intdigest(arena[offset : offset + self._part_bytes])
        return [Part(name, part, checksum) for part, checksum in enumerate([first, *checksums[1:]])]

    def count_intact(self, owner: str, names: Sequence[bytes]) -> int:
        """How many of the leading `names` are here with the bytes that `publish` wrote."""
        intact, data = 0, self._template.data
        for name, page in zip(names, self._depot.lease(owner, names).pages, strict=False):
            found = self._depot.arena[page.offset : page.offset + len(data)]
            intact += found[:NAME_BYTES] == name and found[NAME_BYTES:] == data[NAME_BYTES:]
        self._depot.release(owner)
        return intact

    def release(self, owner: str) -> None:
        """Lets go of what `publish` left."""
        self._depot.release(owner)

    def close(self) -> None:
        """Ends the connection."""
        self._depot.close()
