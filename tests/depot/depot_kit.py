"""What the depot's tests share: pages with known content, and a server on the test's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_64_intdigest

from pdrelay.depot.base import EngineDepot, PageKind, Part
from pdrelay.depot.server import DepotServer
from pdrelay.kv.contract import KVContract, KVGroup

KEY = b"f" * 32
PART_BYTES = 1024


def contract(model: str = "m", **changes: object) -> KVContract:
    """A contract with one group; `changes` are the group's."""
    fields: dict[str, object] = {
        "layers": 4, "heads": 1, "head_size": 64, "dtype": "float32", "part_bytes": PART_BYTES, "codec": "emulated",
    }  # fmt: skip
    group = KVGroup(**(fields | changes))  # type: ignore[arg-type]
    return KVContract(model=model, revision="r", page_tokens=16, block_tokens=16, groups=(group,))


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def content(page: bytes, part: int, size: int, production: int = 0) -> bytes:
    """What a well-behaved engine writes for this part; no two productions of a page are equal."""
    return ((page + bytes([part]) + production.to_bytes(4, "big")) * (size // 37 + 1))[:size]


def write_parts(
    depot: EngineDepot, owner: str, page: bytes, offset: int, shape: KVContract, parts: range, production: int = 0
) -> None:
    done, size = [], shape.layout_of(page).part_bytes
    for part in parts:
        at = offset + part * size
        depot.arena[at : at + size] = content(page, part, size, production)
        done.append(Part(page, part, xxh3_64_intdigest(depot.arena[at : at + size])))
    depot.publish(owner, done)


def produce(depot: EngineDepot, owner: str, pages: list[bytes], shape: KVContract, *, tail: bool = False) -> None:
    """Reserves, writes and publishes whole pages; the last is a transfer page when `tail`."""
    kinds = [PageKind.PREFIX] * (len(pages) - tail) + [PageKind.TRANSFER] * tail
    for page, offset in zip(pages, depot.reserve(owner, pages, kinds), strict=True):
        if offset is not None:
            write_parts(depot, owner, page, offset, shape, range(shape.layout_of(page).parts))


def intact(depot: EngineDepot, owner: str, pages: list[bytes], shape: KVContract) -> bool:
    """Whether all pages can be leased and hold what `produce` wrote."""
    leased = depot.lease(owner, pages).pages
    return len(leased) == len(pages) and all(
        depot.arena[lease.offset : lease.offset + shape.layout_of(page).page_bytes] == whole(page, shape)
        for page, lease in zip(pages, leased, strict=True)
    )


def whole(page: bytes, shape: KVContract, production: int = 0) -> bytes:
    """All parts of a page."""
    parts, size, _ = shape.layout_of(page)
    return b"".join(content(page, part, size, production) for part in range(parts))


def production_of(depot: EngineDepot, page: bytes, offset: int, shape: KVContract) -> int | None:
    """Which production of the page is in the arena; None when its bytes are wrong or of several productions."""
    found = int.from_bytes(depot.arena[offset + 33 : offset + 37], "big")
    size = shape.layout_of(page).page_bytes
    return found if depot.arena[offset : offset + size] == whole(page, shape, found) else None


async def until(condition: Callable[[], bool], seconds: float = 10.0, step: float = 0.005) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(step)


class RunningDepot:
    """A server on the test's own event loop."""

    def __init__(self, server: DepotServer, socket_path: Path) -> None:
        self.server, self.hub, self.socket_path = server, server.hub, socket_path
