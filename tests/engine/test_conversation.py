"""The gateway's end of a WebSocket, against servers that do what ours do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from websockets.server import ServerProtocol

from pdrelay.engine import conversation
from pdrelay.engine.client import WebSocketEngine
from pdrelay.engine.conversation import Conversation, ConversationEndedError
from pdrelay.engine.messages import SUBPROTOCOLS

Play = Callable[[ServerProtocol], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """`serve` at an address, until each connection has ended."""
    ends: list[asyncio.Task[None]] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(asyncio.current_task())
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(5):
            await asyncio.gather(*ends)


def playing(play: Play) -> Serve:
    """Accepts, plays, and then only answers what the protocol must."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = await accepted(reader)
        play(protocol)
        writer.write(b"".join(protocol.data_to_send()))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                protocol.receive_data(data)
                writer.write(b"".join(protocol.data_to_send()))

    return serve


async def accepted(reader: asyncio.StreamReader) -> ServerProtocol:
    protocol = ServerProtocol(subprotocols=list(SUBPROTOCOLS))
    protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
    (handshake,) = protocol.events_received()
    protocol.send_response(protocol.accept(handshake))
    return protocol


async def connected(address: str, receive: Callable[[bytes], None], on_writable=lambda: None) -> Conversation:
    talk = Conversation(receive, on_writable)
    await talk.connect(f"ws://{address}/", SUBPROTOCOLS, None, None)
    return talk


def fragments(protocol: ServerProtocol) -> None:
    protocol.send_binary(b"a" * 60, fin=False)
    protocol.send_ping(b"between")
    protocol.send_continuation(b"b" * 60, fin=False)
    protocol.send_continuation(b"c", fin=True)


async def test_a_message_in_several_frames_is_one(eventually) -> None:
    received: list[bytes] = []
    async with listening(playing(fragments)) as address:
        talk = await connected(address, received.append)
        await eventually(lambda: received)
        assert received == [b"a" * 60 + b"b" * 60 + b"c"]
        talk.close()


async def test_a_frame_that_is_too_long_ends_it_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_MESSAGE", 100)
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = await accepted(reader)
        writer.write(b"".join(protocol.data_to_send()))
        await go.wait()
        protocol.send_binary(b"x" * 101)
        writer.write(b"".join(protocol.data_to_send()))
        await reader.read()

    async with listening(serve) as address, asyncio.timeout(5):
        talk = await connected(address, lambda _: None)
        go.set()
        with pytest.raises(ConversationEndedError, match=r"broke the protocol: .*100"):
            await talk.ended(10.0)


def refuse(_: bytes) -> None:
    raise ValueError("not ours")


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (lambda protocol: protocol.send_text(b"hello"), "sent a text frame"),
        (lambda protocol: protocol.send_close(1001), "shut down"),
        (lambda protocol: protocol.send_close(1008, "go away"), "go away"),
        (lambda protocol: protocol.send_close(), "closed the connection"),
        (lambda protocol: protocol.send_binary(b"x" * 101), "exceed"),
        (fragments, "sent a message of more than 100 bytes"),
    ],
)
async def test_its_end_has_a_reason(monkeypatch: pytest.MonkeyPatch, play: Play, reason: str) -> None:
    monkeypatch.setattr(conversation, "MAX_MESSAGE", 100)
    async with listening(playing(play)) as address, asyncio.timeout(5):
        talk = await connected(address, lambda _: None)
        with pytest.raises(Exception, match=reason):
            await talk.ended(10.0)
        talk.send(b"nobody reads it, and nothing happens")


async def test_what_the_reader_raises_ends_it() -> None:
    async with listening(playing(lambda protocol: protocol.send_binary(b"x"))) as address, asyncio.timeout(5):
        talk = await connected(address, refuse)
        with pytest.raises(ValueError, match="not ours"):
            await talk.ended(10.0)


async def test_a_server_that_is_no_engine(eventually) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    async with listening(serve) as address:
        engine = WebSocketEngine("engine", address, None)
        await eventually(lambda: engine.status.detail == "answered HTTP 403")
        await engine.aclose()


async def test_it_tells_when_the_server_does_not_read_and_when_it_does_again(eventually) -> None:
    go, told, sizes = asyncio.Event(), [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = await accepted(reader)
        writer.write(b"".join(protocol.data_to_send()))
        await go.wait()
        while data := await reader.read(1 << 20):
            sizes.append(len(data))

    async with listening(serve) as address:
        talk = await connected(address, lambda _: None, lambda: told.append(True))
        sent = 0
        while talk.writable:
            talk.send(bytes(1 << 16))
            sent += 1 << 16
        assert told == [True]
        go.set()
        await eventually(lambda: len(told) == 2)
        assert talk.writable
        talk.close()
        await eventually(lambda: sum(sizes) > sent)


async def test_a_connection_that_was_given_up_is_closed() -> None:
    asked, answer, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = await accepted(reader)
        asked.set()
        await answer.wait()
        writer.write(b"".join(protocol.data_to_send()))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        over.set()

    async with listening(serve) as address, asyncio.timeout(5):
        connecting = asyncio.create_task(connected(address, lambda _: None))
        await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        answer.set()
        await over.wait()


async def test_a_server_that_hangs_up_in_the_handshake() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with listening(serve) as address:
        with pytest.raises(ConversationEndedError, match="does it accept our certificate"):
            await connected(address, lambda _: None)
