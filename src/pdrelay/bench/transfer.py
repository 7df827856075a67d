"""`pdrelay bench transfer`: its parts, run one after another; what one part cannot do does not lose the others."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdrelay.bench import fleet
from pdrelay.bench.contestants import Contestant, OurLink, Peer, bare_loop
from pdrelay.bench.machine import Machine, describe
from pdrelay.bench.throughput import Entry, Row, compare, ready
from pdrelay.cluster.ports import free_addresses
from pdrelay.kv.contract import KVContract, KVGroup

PEERS = ("iperf3", "nixl", "mooncake")
"""Names of the peers' scripts."""

_IN_CHECKOUT = Path("benchmarks", "peers")

ARENA_ROUNDS = 1.25
"""Arena per payload of a round: the next round's pages evict the last one's."""


class Shape(NamedTuple):
    """Sizes. The defaults are those of a model with 8 KV heads of 128 in bfloat16 and pages of 16 tokens: a part, one
    layer's keys and values, has 64 KiB, and with 32 layers a page has 2 MiB."""

    part_bytes: int = 64 << 10
    parts: int = 32
    size: int = 512 << 20  # of a measurement

    @property
    def contract(self) -> KVContract:
        """The KV contract of the two engines."""
        group = KVGroup(
            layers=self.parts, heads=8, head_size=128, dtype="bfloat16", part_bytes=self.part_bytes, codec="bench"
        )
        return KVContract(model="bench", revision="", page_tokens=16, block_tokens=16, groups=(group,))

    @property
    def pages(self) -> int:
        """Pages of a measurement."""
        return max(1, self.size // self.contract.page_bytes)


class Settings(NamedTuple):
    """The options of the command."""

    parts: Sequence[str] = ("throughput",)
    connections: int = 4
    rounds: int = 7
    shape: Shape = Shape()
    peers: Path = _IN_CHECKOUT
    chunk: int = 1 << 20  # a batch of the link at its largest, so what it gives to a send


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the first part."""

    connections: int
    bytes: int
    rounds: int
    rows: list[Row]


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    bench: str = "transfer"
    machine: Machine
    command: str
    throughput: Throughput | None = None
    failures: dict[str, str] = {}


async def run(settings: Settings, report: Report, progress: Callable[[str], None]) -> None:
    """Fills `report`."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-bench-") as scratch:
        directory = Path(scratch)
        report.throughput = await throughput(settings, directory, progress)
        report.failures |= {row.name: row.detail for row in report.throughput.rows if row.status == "failed"}


def default_peers() -> Path:
    """Where the peers' scripts are: below the working directory, or in the checkout that this package is part of."""
    checkout = Path(__file__).resolve().parents[3] / _IN_CHECKOUT
    return checkout if checkout.is_dir() and not _IN_CHECKOUT.is_dir() else _IN_CHECKOUT


def new_report(command: str) -> Report:
    """A report without results."""
    return Report(machine=describe(), command=command)


async def throughput(settings: Settings, directory: Path, progress: Callable[[str], None]) -> Throughput:
    """One line between two depots on this machine, beside the bare loop and the peers."""
    shape = settings.shape
    size = shape.pages * shape.contract.page_bytes
    tls = fleet.make_certificates(directory)
    loop = partial(bare_loop, connections=settings.connections, chunk=settings.chunk, size=size)
    entries = [
        Entry("bare loop, plain", partial(loop, "bare-plain", directory, tls=None), ""),
        Entry("pdrelay, TLS", partial(_our_link, "tls", settings, directory, tls, "all"), "bare loop, TLS"),
        Entry("bare loop, TLS", partial(loop, "bare-tls", directory, tls=tls), ""),
    ]
    entries += [Entry(name, partial(_peer, settings, name, size), "bare loop, plain") for name in PEERS]
    rows = await compare(entries, settings.rounds, progress)
    return Throughput(connections=settings.connections, bytes=size, rounds=settings.rounds, rows=rows)


def _peer(settings: Settings, name: str, size: int) -> AbstractAsyncContextManager[Contestant]:
    return ready(Peer(settings.peers / f"{name}.py", settings.connections, settings.chunk, size))


@asynccontextmanager
async def _our_link(
    name: str, settings: Settings, directory: Path, tls: Path, encryption: fleet.Encryption
) -> AsyncIterator[Contestant]:
    shape = settings.shape
    page_bytes = shape.contract.page_bytes
    sender, receiver = free_addresses(2)
    options = fleet.LinkOptions(connections=settings.connections, encryption=encryption)
    arena = int(shape.pages * page_bytes * ARENA_ROUNDS) + page_bytes
    route = fleet.Route(sender, receiver, receiver, receiver)
    async with fleet.running(name, directory, tls, route, options, shape.contract, arena) as depots:
        yield OurLink(depots, shape.pages, page_bytes)
