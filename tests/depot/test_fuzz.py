"""Bytes of any kind at the frame parsers and at a live listener: they are refused, and nothing is held."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from depot_kit import KEY, names, until
from hypothesis import given, settings
from hypothesis import strategies as st
from link_kit import SHAPE, Site, World

from pdrelay.cluster.tls import client_context
from pdrelay.depot import link_messages as link
from pdrelay.depot import wire
from pdrelay.depot.base import Transfer
from pdrelay.depot.hub import Hub
from pdrelay.depot.sockets import dial_bulk, dial_control, read_frame
from pdrelay.errors import PdrelayError, ProtocolError

KEY_CHECK = Hub("p", memoryview(b""), KEY, lambda: 0.0).key_check
HELLO = link.LinkHello(depot="p", key_check=KEY_CHECK, contracts=[SHAPE])
OFFER = link.Offer(xfer="x", names=names(1, 2), tails=1, addressee="e", background=False, contract=SHAPE)
RUN = link.Run(names(1)[0], 3, 0, 64, bytes(16))

LINK = [
    OFFER, link.Live(["x"]), link.Ended("x"), link.Demoted("x", 1), link.Answered("x", b"\3"), link.Arrived("x"),
    link.Wants("x", [link.Want(names(1)[0], 1, b"\xff")]), link.Suspect("x", names(1)[0], 1), link.Ack([1, 2]),
    link.Revoke([(names(1)[0], 1)]), link.Contracts([SHAPE]), link.Ping(), link.AskSecrets(1),
    link.Stats(room=1, waiting=0, corrupt=0),
]  # fmt: skip
ODD = [
    link.Offer(xfer="x", names=names(1, 1), tails=9, addressee="e", background=True, contract=None),
    link.Offer(xfer="y", names=[], tails=-1, addressee="", background=False, contract=SHAPE),
    link.Demoted("x", -5), link.Demoted("x", 1 << 40), link.AskSecrets(-1), link.AskSecrets(1 << 40),
    link.Revoke([(b"", -1)]), link.Ack([-1]),
]  # fmt: skip
"""Well-formed, and nothing that a depot says."""
CLIENT = [
    wire.Call(1, wire.Match(names(1))), wire.Call(2, wire.StartTransfer(Transfer(xfer="x", names=names(1), to="d"))),
    wire.Tell(wire.Subscribe(1)), wire.Call(3, wire.AskStats()),
]  # fmt: skip
BATCH = link.Batch(1, [RUN])
Decode = Callable[[bytes], object]
DECODERS: list[tuple[Decode, Sequence[msgspec.Struct]]] = [
    (link.decode, LINK), (link.decode_first, [HELLO, wire.Hello(kind="control", name="g", epoch="1")]),
    (link.decode_hello, [HELLO]), (link.decode_bulk_hello, [link.BulkHello(depot="p", secret=b"s" * 32)]),
    (link.decode_batch, [BATCH]), (link.decode_note, [BATCH]), (wire.decode_to_depot, CLIENT),
    (wire.decode_hello, [wire.Hello(kind="engine", name="e", epoch="1", contract=SHAPE)]),
    (wire.decode_welcome, [wire.Welcome(wire.VERSIONS, "d", KEY, "1")]),
    (wire.decode_from_depot, [wire.Failure(1, "DepotError", ["x"])]),
]  # fmt: skip


def body(message: msgspec.Struct) -> bytes:
    return wire.frame(message)[wire.HEADER.size :]


def changed(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bits turned over, bytes cut out or put in, or its end missing."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(4):
            case 0 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                result[at:at] = rng.randbytes(rng.randint(1, 4))
            case 2:
                del result[at : at + rng.randint(1, 4)]
            case _:
                result = result[: max(at, 1)]
    return bytes(result)


@pytest.mark.parametrize("number", range(len(DECODERS)))
@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=True), noise=st.binary(max_size=80))
def test_decoders_raise_only_protocol_errors(number: int, rng: random.Random, noise: bytes) -> None:
    decode, valid = DECODERS[number]
    for data in (noise, changed(body(rng.choice(valid)), rng)):
        with contextlib.suppress(ProtocolError):
            decode(data)


def test_what_is_changed_was_valid() -> None:
    for decode, valid in DECODERS:
        for message in valid:
            with contextlib.suppress(PdrelayError):  # a failure is decoded to what it says
                assert decode(body(message)) is not None


@given(pieces=st.lists(st.binary(max_size=40), max_size=5))
@settings(max_examples=150, deadline=None)
def test_a_stream_is_cut_into_the_same_frames_however_it_comes(pieces: list[bytes]) -> None:
    whole, bits = wire.Unframer(), wire.Unframer()
    stream = b"".join(pieces)

    def frames(unframer: wire.Unframer, chunks: list[bytes]) -> tuple[list[bytes], bool]:
        found: list[bytes] = []
        try:
            for chunk in chunks:
                found.extend(unframer.feed(chunk))
        except ProtocolError:
            return found, False
        return found, True

    assert frames(whole, [stream]) == frames(bits, [stream[at : at + 1] for at in range(len(stream))])


@pytest.fixture
async def site(world: World) -> Site:
    return await world.site("d")


async def test_a_peer_that_says_anything_is_cut_and_leaves_nothing(
    world: World, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A depot with a certificate and the fleet's key, but broken. It may say what is valid, too."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = set(asyncio.all_tasks())
    for _ in range(60):
        reader, writer = await dial_control(f"127.0.0.1:{site.listener.port}", client_context(world.tls, "p"), "d")
        writer.write(wire.frame(HELLO))
        link.decode_hello(await read_frame(reader))
        for message in rng.sample([*LINK, *ODD], 4):
            data = changed(body(message), rng) if rng.random() < 0.4 else body(message)
            writer.write(wire.HEADER.pack(len(data)) + data)
        writer.write(b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
        writer.close()
    site.hub.receivers._keep_only("p", ())  # what a lost peer sent is kept for it a while
    site.hub.settle()
    await until(site.idle)
    await until(lambda: not site.hub.receivers._send and not site.hub.contracts.declared("peer:"))
    await until(lambda: not site.listener._connections.open)
    await until(lambda: set(asyncio.all_tasks()) <= before)
    assert not site.hub.inbox._slots
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "what it says is no surprise"
    assert (await (await site.control()).stats()).used_bytes == 0


async def test_a_bulk_connection_that_says_anything_is_cut(world: World, site: Site) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    address, tls = f"127.0.0.1:{site.listener.port}", client_context(world.tls, "p")
    reader, writer = await dial_control(address, tls, "d")
    writer.write(wire.frame(HELLO))
    link.decode_hello(await read_frame(reader))
    writer.write(wire.frame(OFFER))
    await until(lambda: len(site.hub.inbox._slots) == 2)

    def talk(data: bytes) -> None:
        with dial_bulk(address, tls, "d") as sock, contextlib.suppress(OSError):
            sock.sendall(wire.frame(link.BulkHello(depot="p")))
            sock.sendall(data)
            sock.settimeout(5)

    for _ in range(40):
        data = changed(body(BATCH), rng)
        await asyncio.to_thread(talk, wire.HEADER.pack(len(data)) + data + rng.randbytes(200))
    await until(lambda: not site.listener._receivers)
    assert all(page.have == 0 for page in site.hub.index), "nothing of it was taken for a page's bytes"
    writer.close()
    await until(lambda: not site.hub.receivers._send)
    site.hub.receivers._keep_only("p", ())
    site.hub.settle()
    await until(site.idle)
    assert not site.hub.inbox._slots
