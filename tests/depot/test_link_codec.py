"""Depots joined by links with a codec: what arrives, what it is said to be, and what is refused."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from depot_kit import contract, names, until
from link_kit import Line, Site, World
from xxhash import xxh3_64_intdigest

from pdrelay.cluster.topology import CodecName
from pdrelay.depot import link_messages as link
from pdrelay.depot.base import EngineDepot, LinkState, PageKind, Part, Transfer
from pdrelay.depot.checksums import pack_checksums
from pdrelay.depot.codec import codec_named
from pdrelay.depot.codec.base import Encoded
from pdrelay.depot.memory import MemoryDepot
from pdrelay.depot.memory_link import link as memory_link
from pdrelay.depot.metrics import render
from pdrelay.depot.payload import RunDecoder, RunEncoder
from pdrelay.kv.contract import KVContract
from pdrelay.kv.shape import PartShape

FLOATS = contract(
    layers=6, heads=3, head_size=64, dtype="bfloat16", part_bytes=16 * 3 * 2 * 64 * 2, codec="vllm-cpu/LBHNC/vec"
)
PARTS, PART_BYTES, SHAPE = FLOATS.layouts[0]
CODECS: list[CodecName] = ["zstd", "int8", "fp8"]
NOT_FINITE = 4
"""In each page the part with this number has an infinity."""

Values = npt.NDArray[np.float32]


def values_of(page: bytes) -> Values:
    """What a page holds, `[parts, elements]`."""
    values = np.random.default_rng(zlib.crc32(page)).standard_normal((PARTS, PART_BYTES // 2))
    values[NOT_FINITE, 7] = np.inf
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def produce(depot: EngineDepot, owner: str, pages: list[bytes]) -> None:
    offsets = depot.reserve(owner, pages, [PageKind.PREFIX] * len(pages))
    for page, offset in zip(pages, offsets, strict=True):
        assert offset is not None
        data = values_of(page).astype(ml_dtypes.bfloat16).tobytes()
        depot.arena[offset : offset + len(data)] = data
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        depot.publish(owner, [Part(page, at, xxh3_64_intdigest(part)) for at, part in enumerate(parts)])


def found(site: Site, page: bytes) -> Values:
    """What the site's copy of the page holds; its checksums must fit."""
    copy = site.hub.index.get(page)
    assert copy is not None
    assert copy.complete
    data = bytes(site.hub.arena[copy.offset : copy.offset + copy.layout.page_bytes])
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    assert [xxh3_64_intdigest(part) for part in parts] == list(copy.checksums)
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(PARTS, -1).astype(np.float32)


def require_close(site: Site, pages: list[bytes], name: CodecName) -> None:
    for page in pages:
        before, after = values_of(page), found(site, page)
        assert (before[NOT_FINITE] == after[NOT_FINITE]).all()
        if name == "zstd":
            assert (before == after).all()
        else:
            finite = [part for part in range(PARTS) if part != NOT_FINITE]
            error = np.abs(before[finite] - after[finite])
            assert 0 < error.max() < np.abs(before[finite]).max() / 20


def encoder(name: CodecName, kind: type[RunEncoder] = RunEncoder) -> RunEncoder:
    return kind(codec_named(name, "link[0].codec"))


def decoder(name: CodecName) -> RunDecoder:
    return RunDecoder(codec_named(name, "link[0].codec"))


async def joined(
    world: World, name: CodecName, there: CodecName | None = None, kind: type[RunEncoder] = RunEncoder
) -> tuple[Site, Site, Line]:
    p, d = await world.site("p"), await world.site("d")
    line = await world.line(d)
    p.hub.codecs.encoders["d"], d.hub.codecs.decoders["p"] = encoder(name, kind), decoder(there or name)
    p.link("d", line.address, rate=1e6)  # batches of a few parts
    return p, d, line


async def run(work: Callable[[], object]) -> None:
    await asyncio.to_thread(work)


async def send(p: Site, to: str, pages: list[bytes], xfer: str = "x") -> None:
    """Makes the pages at `p` and has them sent; returns when they are delivered."""
    control = await p.control()
    if p.hub.index.get(pages[0]) is None:
        prefill = await p.engine("prefill", FLOATS)
        await run(lambda: produce(prefill, "r", pages))
        await run(lambda: prefill.release("r"))
    await control.transfer(Transfer(xfer=xfer, names=pages, to=to))
    await until(lambda: p.hub.senders.stats(xfer).delivered, 20)


async def end(sites: list[Site], xfer: str = "x") -> None:
    control = await sites[0].control()
    await control.end(xfer)
    await until(lambda: all(site.idle() for site in sites))


@pytest.mark.parametrize("name", CODECS)
async def test_pages_cross_in_fewer_bytes_and_say_what_they_are(world: World, name: CodecName) -> None:
    p, d, _ = await joined(world, name)
    pages = names(*range(1, 13))
    await send(p, "d", pages)
    await run(lambda: require_close(d, pages, name))
    await until(lambda: p.hub.senders.stats("x").sent == 12 * FLOATS.page_bytes)
    stats, here, there = p.hub.senders.stats("x"), p.hub.stats(), d.hub.stats()
    assert stats.wire == here.sent_wire_bytes == there.received_wire_bytes < 0.9 * stats.sent
    assert here.lossy_pages == 0
    assert there.lossy_pages == (0 if name == "zstd" else 12)
    assert f'link_encode_wire_bytes_total{{depot="p",to="d",codec="{name}"}} {stats.wire}\n' in render(p.hub)
    assert f'link_decode_payload_bytes_total{{depot="d",from="p",codec="{name}"}} {stats.sent}\n' in render(d.hub)
    ratio = round(stats.sent / stats.wire, 2)
    await until(lambda: any(estimate.ratio == ratio for estimate in p.hub.links.estimates.values()))
    await end([p, d])


@pytest.mark.parametrize("name", CODECS)
async def test_a_broken_line_and_flipped_bits_cost_only_what_was_under_way(world: World, name: CodecName) -> None:
    p, d, line = await joined(world, name, kind=Flipping)
    pages = names(*range(1, 25))
    line.cut_after, line.flip_after = line.passed + 300_000, line.passed + 600_000
    await send(p, "d", pages)
    assert (line.cut_after, line.flip_after) == (None, None)
    await run(lambda: require_close(d, pages, name))
    assert d.hub.stats().corrupt_parts >= 2
    await end([p, d])


class Flipping(RunEncoder):
    """Flips a bit in every fifth run, behind the back of checksums."""

    runs = 0

    def encode(self, run: link.Run, parts: memoryview, shape: PartShape) -> tuple[link.Run, Encoded]:
        run, data = super().encode(run, parts, shape)
        self.runs += 1
        if self.runs % 5 == 0:
            damaged = bytearray(data)
            damaged[len(damaged) // 2] ^= 4
            return run, damaged
        return run, data


class Hostile(RunEncoder):
    """Its first runs hold what no codec made, with a checksum that fits."""

    runs = 0

    def encode(self, run: link.Run, parts: memoryview, shape: PartShape) -> tuple[link.Run, Encoded]:
        self.runs += 1
        if self.runs > 5:
            return super().encode(run, parts, shape)
        data = (b"\xff" * 8 + b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + bytes(99))[: run.payload - 1]
        encoding = link.Encoding(self.name, len(data), xxh3_64_intdigest(data))
        return link.Run(run.name, run.epoch, run.first, run.part_bytes, run.checksums, "", encoding), data


@pytest.mark.parametrize("name", CODECS)
async def test_hostile_encodings_are_dropped_counted_and_wanted_again(world: World, name: CodecName) -> None:
    p, d, _ = await joined(world, name, kind=Hostile)
    pages = names(1, 2, 3, 4, 5, 6)
    await send(p, "d", pages)
    await run(lambda: require_close(d, pages, name))
    assert d.hub.stats().corrupt_parts >= 5
    assert p.hub.links.up() == {"d": True}
    await end([p, d])


async def refusal(p: Site) -> str:
    """Why p's link is down."""
    states: list[LinkState] = []
    p.hub.subscribe(lambda event: states.append(event) if isinstance(event, LinkState) else None)
    await until(lambda: any("ContractError" in state.detail for state in states))
    return next(state.detail for state in states if "ContractError" in state.detail)


async def test_both_ends_of_a_link_must_have_the_same_codec(world: World) -> None:
    p, d, _ = await joined(world, "int8", "none")
    assert "link.codec: 'none' here, 'int8' there" in await refusal(p)
    assert not d.hub.receivers._send


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (contract(), "full_attention of float32 in emulated"),
        (contract(kind="mla", codec="vllm-cpu/LBHNC/vec"), "mla of float32 in vllm-cpu/LBHNC/vec"),
        (contract(kind="linear_state", dtype="int8", head_size=0), "linear_state of int8"),
        (
            contract(dtype="float8_e4m3fn", part_bytes=2048, codec="vllm-cuda/LBNHC"),
            "full_attention of float8_e4m3fn in vllm-cuda/LBNHC",
        ),
    ],
)
@pytest.mark.parametrize("end", ["sender", "receiver"])
async def test_a_lossy_codec_is_refused_where_heads_are_not_known(
    world: World, there: KVContract, reason: str, end: str
) -> None:
    p, d, _ = await joined(world, "fp8")
    await until(lambda: p.hub.links.up() == {"d": True})
    await (p if end == "sender" else d).engine("odd", there)
    detail = await refusal(p)
    assert "link.codec: 'fp8" in detail
    assert f"groups[0] of m: {reason}" in detail


@pytest.mark.parametrize("second", CODECS)
async def test_a_lossy_copy_is_passed_on_as_it_is_and_says_so(world: World, second: CodecName) -> None:
    p, d, _ = await joined(world, "int8")
    q = await world.site("q")
    d.hub.codecs.encoders["q"], q.hub.codecs.decoders["d"] = encoder(second), decoder(second)
    d.link("q", f"127.0.0.1:{q.listener.port}")
    pages = names(1, 2, 3)
    await send(p, "d", pages)
    await end([p, d])
    await send(d, "q", pages, "y")
    for page in pages:
        assert (found(q, page) == found(d, page)).all()
        copy = q.hub.index.get(page)
        assert copy is not None
        assert copy.fidelity == "int8"
    assert q.hub.stats().lossy_pages == 3
    await end([d, q], "y")


def run_with(parts: bytes) -> link.Run:
    sums = [xxh3_64_intdigest(parts[at : at + PART_BYTES]) for at in range(0, len(parts), PART_BYTES)]
    return link.Run(b"n" * 32, 1, 0, PART_BYTES, pack_checksums(sums))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_corrupt_at_the_sender_is_noticed_at_the_receiver(name: CodecName) -> None:
    data = bytearray(values_of(b"x")[:NOT_FINITE].astype(ml_dtypes.bfloat16).tobytes())
    run = run_with(data)
    data[5] ^= 64
    sent, wire = encoder(name).encode(run, memoryview(data), SHAPE)
    into = bytearray(len(data))

    def read_into(view: memoryview) -> None:
        view[:] = memoryview(wire)[: len(view)]

    assert decoder(name).read(sent, memoryview(into), read_into, SHAPE) == 0, "nothing may claim to be a lossy copy"
    assert into == data, "so the producer's checksum shows what is wrong"


@pytest.mark.parametrize("name", CODECS)
def test_the_twin_carries_codecs_too(name: CodecName) -> None:
    p, d = MemoryDepot("p", 1 << 20), MemoryDepot("d", 1 << 20)
    carried = memory_link(p, d, codec=codec_named(name, "link[0].codec"))
    carried.corrupt_next = 3
    prefill, pages = p.engine("prefill", FLOATS), names(1, 2, 3)
    d.engine("decode", FLOATS)
    with p.turn():
        p.hub.transfer(Transfer(xfer="x", names=pages, to="d"), "gateway")
    produce(prefill, "r", pages)
    assert p.hub.senders.stats("x").delivered
    assert d.hub.stats().corrupt_parts >= 3
    assert d.hub.stats().lossy_pages == (0 if name == "zstd" else 3)
