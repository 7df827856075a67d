"""The session protocol over real WebSockets with mutual TLS, and its in-memory twin."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.server import ServerProtocol

from pdrelay.cluster import certs
from pdrelay.cluster.tls import client_context
from pdrelay.engine.base import Chunk, Emit, Engine, EngineSession, SessionEvent
from pdrelay.engine.client import WebSocketEngine
from pdrelay.engine.conversation import Conversation
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import (
    PATH,
    SUBPROTOCOLS,
    VERSIONS,
    Abort,
    Extend,
    Extended,
    Failed,
    Finished,
    Hello,
    Load,
    Open,
    Opened,
    Sampling,
    Takeover,
    Tokens,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from pdrelay.errors import EngineRejectedError, EngineUnavailableError
from pdrelay.kv.contract import KVContract
from pdrelay.versions import Versions


class CountingBackend:
    """Emits the integers from the length of what it was given; misbehaves on request, by `cache_salt`."""

    def __init__(self, *, instance: str = "engine", epoch: str = "1", versions: Versions = VERSIONS) -> None:
        self.hello = Hello(
            versions=versions, instance=instance, epoch=epoch, model="m", max_model_len=1000, max_num_seqs=64,
            contract=KVContract(model="m", revision="", page_tokens=32, block_tokens=32, groups=()),
        )  # fmt: skip
        self.live = 0
        self.started = 0

    def load(self) -> Load:
        return Load(running=self.live, waiting=0, kv_usage=0.0)

    async def run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        self.live += 1
        self.started += 1
        try:
            await self._run(request, chunks, emit)
        finally:
            await asyncio.sleep(0)  # letting go takes a moment, as in a real engine
            self.live -= 1

    async def _run(self, request: Open, chunks: AsyncIterator[Chunk], emit: Emit) -> None:
        sid = request.sid
        match request.cache_salt:
            case "reject":
                raise EngineRejectedError("too long", 413)
            case "crash":
                raise RuntimeError("boom")
            case "silent":
                return
            case "flood":
                index = 0
                while True:
                    emit(Tokens(sid, index, [7] * 100))
                    index += 1
                    await asyncio.sleep(0)
        if request.mode == "prefill":
            emit(Tokens(sid, 0, [len(request.prompt)]))
            emit(Finished(sid=sid, reason=None))
            return
        emit(Opened(sid=sid, cached_tokens=0, loaded_tokens=0, pages_ready=0, ready=0, prediction=1))
        computed = len(request.eager)
        async for chunk in chunks:
            computed += len(chunk.ids)
            if isinstance(chunk, Extend):
                emit(Extended(sid, computed, computed))
        for index in range(computed, request.sampling.max_tokens):
            await asyncio.sleep(0.001)
            emit(Tokens(sid, index, [index]))
        emit(Finished(sid=sid, reason="length"))


def request(sid: str = "a", *, salt: str = "", max_tokens: int = 20, mode: str = "decode") -> Open:
    return Open(sid=sid, mode=mode, prompt=[1, 2, 3], sampling=Sampling(max_tokens=max_tokens), cache_salt=salt)


async def collect(session: EngineSession, timeout: float = 20) -> list[SessionEvent]:
    async with asyncio.timeout(timeout):
        return [event async for event in session.events()]


def output(events: list[SessionEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.fixture(params=["socket", "memory"])
async def engine(request, serve, tls, eventually) -> AsyncIterator[Engine]:
    backend = CountingBackend()
    if request.param == "memory":
        engine = LocalEngine(backend)
        yield engine
        await engine.aclose()
    else:
        async with serve(backend) as served:
            engine = WebSocketEngine("engine", served.address, client_context(tls, "gateway"))
            await eventually(lambda: engine.status.healthy)
            yield engine
            await engine.aclose()
    await eventually(lambda: backend.live == 0)


async def test_prefill_is_told_at_once_and_what_else_a_tick_sends_in_one_frame(serve, tls, eventually, monkeypatch):
    frames: list[list[str]] = []
    send = Conversation.send

    def keep(self: Conversation, message: bytes) -> None:
        frames.append([told.sid for told in decode_to_engine(message)])
        send(self, message)

    monkeypatch.setattr(Conversation, "send", keep)
    async with serve(CountingBackend()) as served:
        engine = WebSocketEngine("engine", served.address, client_context(tls, "gateway"))
        await eventually(lambda: engine.status.healthy)
        for sid, mode in (("p0", "prefill"), ("r1", "decode"), ("m2", "decode")):
            engine.open(Open(sid=sid, mode=mode, prompt=[1], sampling=Sampling(max_tokens=2)))
        assert frames == [["p0"]]
        await eventually(lambda: len(frames) > 1)
        assert frames == [["p0"], ["r1", "m2"]]
        await engine.aclose()


async def test_session_life(engine: Engine) -> None:
    session = engine.open(request(max_tokens=6))
    session.extend([0, 1])
    session.takeover([2])
    events = await collect(session)
    assert [type(event) for event in events[:2]] == [Opened, Extended]
    assert output(events) == [3, 4, 5]
    assert events[-1] == Finished(sid="a", reason="length")
    assert engine.status.hello.instance == "engine"


async def test_prefill_session(engine: Engine) -> None:
    events = await collect(engine.open(request(mode="prefill")))
    assert events == [Tokens("a", 0, [3]), Finished(sid="a", reason=None)]


async def test_fifty_concurrent_sessions(engine: Engine) -> None:
    async def one(number: int) -> list[int]:
        session = engine.open(request(f"s{number}", max_tokens=30))
        session.takeover(list(range(number % 7)))
        return output(await collect(session))

    outputs = await asyncio.gather(*(one(number) for number in range(50)))
    assert outputs == [list(range(number % 7, 30)) for number in range(50)]


@pytest.mark.parametrize(
    ("salt", "status", "text"),
    [("reject", 413, "too long"), ("crash", 500, "RuntimeError: boom"), ("silent", 500, "without a result")],
)
async def test_errors_become_failed(engine: Engine, salt: str, status: int, text: str) -> None:
    (failed,) = await collect(engine.open(request(salt=salt)))
    assert isinstance(failed, Failed)
    assert failed.status == status
    assert text in failed.message


async def test_chunk_after_takeover_fails_the_session_only(engine: Engine) -> None:
    bad, good = engine.open(request("bad", max_tokens=500)), engine.open(request("good"))
    for session in (bad, good):
        session.takeover([])
    bad.extend([1])
    assert (await collect(bad))[-1] == Failed(sid="bad", status=400, message="chunk after Takeover")
    assert output(await collect(good)) == list(range(20))


async def test_abort_ends_events_and_frees(engine: Engine, eventually) -> None:
    session = engine.open(request(max_tokens=100_000))
    session.takeover([])
    events = session.events()
    while not isinstance(await anext(events), Tokens):
        pass
    session.abort()
    session.abort()
    assert await collect(session) == []
    again = engine.open(request("b", max_tokens=3))
    again.takeover([])
    assert output(await collect(again)) == [0, 1, 2]
    await eventually(lambda: engine.status.load.running == 0)


async def test_abort_releases_a_waiting_consumer(engine: Engine) -> None:
    session = engine.open(request())
    events = session.events()
    assert isinstance(await anext(events), Opened)
    waiting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)  # it has begun to wait
    session.abort()
    async with asyncio.timeout(10):
        assert await waiting is None


async def test_lost_connection_raises_in_every_session(serve, tls, eventually) -> None:
    backend = CountingBackend()
    async with serve(backend) as served:
        engine = WebSocketEngine("engine", served.address, client_context(tls, "gateway"))
        await eventually(lambda: engine.status.healthy)
        sessions = [engine.open(request(f"s{n}", max_tokens=100_000)) for n in range(5)]
        for session in sessions:
            session.takeover([])
        await eventually(lambda: backend.live == 5)
        served.drop_connections()
        for session in sessions:
            with pytest.raises(EngineUnavailableError, match="engine engine: connection lost"):
                await collect(session, timeout=2)
        await eventually(lambda: backend.live == 0)
        await eventually(lambda: engine.status.healthy, timeout=3)
        again = engine.open(request(max_tokens=2))
        again.takeover([])
        assert output(await collect(again)) == [0, 1]
        await engine.aclose()


async def test_restart_is_noticed(serve, tls, eventually) -> None:
    async with serve(CountingBackend(epoch="1")) as served:
        engine = WebSocketEngine("engine", served.address, client_context(tls, "gateway"))
        await eventually(lambda: engine.status.healthy)
    await eventually(lambda: engine.status.detail == "connection refused")
    assert not engine.status.healthy
    down_since = engine.status.since
    with pytest.raises(EngineUnavailableError, match="connection refused"):
        engine.open(request())
    async with serve(CountingBackend(epoch="2"), port=int(served.address.rpartition(":")[2])):
        await eventually(lambda: engine.status.healthy, timeout=5)
        assert engine.status.hello.epoch == "2"
        assert engine.status.since > down_since
        await engine.aclose()


async def test_aclose_ends_sessions(engine: Engine) -> None:
    session = engine.open(request(max_tokens=100_000))
    await engine.aclose()
    with pytest.raises(EngineUnavailableError):
        await collect(session)
    with pytest.raises(EngineUnavailableError):
        engine.open(request("b"))


async def test_kill_and_revive_in_memory(eventually) -> None:
    backend = CountingBackend()
    engine = LocalEngine(backend)
    session = engine.open(request(max_tokens=100_000))
    session.takeover([])
    await eventually(lambda: backend.live)
    engine.kill()
    with pytest.raises(EngineUnavailableError, match="connection lost"):
        await collect(session)
    with pytest.raises(EngineUnavailableError):
        engine.open(request())
    engine.revive(CountingBackend(epoch="2"))
    assert engine.status.hello.epoch == "2"
    assert len(await collect(engine.open(request(mode="prefill")))) == 2
    await engine.aclose()
    assert backend.live == 0


@pytest.mark.parametrize(
    ("backend", "detail"),
    [
        (CountingBackend(versions=Versions(8, 9)), f"we speak {VERSIONS}, engine engine speaks versions 8 to 9"),
        (CountingBackend(instance="other"), "calls itself other"),  # the certificate is right, the configuration not
    ],
)
async def test_wrong_engine(serve, tls, eventually, backend: CountingBackend, detail: str) -> None:
    async with serve(backend) as served:
        engine = WebSocketEngine("engine", served.address, client_context(tls, "gateway"))
        await eventually(lambda: detail in engine.status.detail)
        assert not engine.status.healthy
        await engine.aclose()


async def test_tls_verifies_both_sides(serve, tls, tmp_path, eventually) -> None:
    strange, uninvited = tmp_path / "strange", tmp_path / "uninvited"
    certs.ensure(strange, ["gateway"])
    shutil.copytree(strange, uninvited)
    (uninvited / "ca.pem").write_bytes((tls / "ca.pem").read_bytes())
    expected = {
        "not trusting": (client_context(strange, "gateway"), "engine", "its certificate is not accepted: "),
        "not trusted": (client_context(uninvited, "gateway"), "engine", "does it accept our certificate?"),
        "another instance": (client_context(tls, "gateway"), "other", "Hostname mismatch"),
    }
    async with serve(CountingBackend()) as served:
        for context, instance, detail in expected.values():
            engine = WebSocketEngine(instance, served.address, context)
            await eventually(lambda: engine.status.detail != "not connected yet")  # noqa: B023
            assert detail in engine.status.detail
            await engine.aclose()


async def greet_and_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that accepts and says Hello, and then answers nothing, no ping either."""
    protocol = ServerProtocol(subprotocols=list(SUBPROTOCOLS))
    protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
    (handshake,) = protocol.events_received()
    protocol.send_response(protocol.accept(handshake))
    protocol.send_binary(encode([CountingBackend().hello]))
    writer.write(b"".join(protocol.data_to_send()))
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def test_hung_engine_is_taken_for_dead(eventually) -> None:
    async with await asyncio.start_server(greet_and_hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        engine = WebSocketEngine("engine", f"127.0.0.1:{port}", None, ping_interval=0.2)
        await eventually(lambda: engine.status.healthy)
        session = engine.open(request())
        with pytest.raises(EngineUnavailableError, match="no answer to 3 pings"):
            await collect(session, timeout=3)
        await engine.aclose()


def answer_pings(server: socket.socket) -> None:
    """An engine that says Hello and answers pings, on a thread of its own."""
    peer, _ = server.accept()
    protocol = ServerProtocol(subprotocols=list(SUBPROTOCOLS))
    with peer, contextlib.suppress(ConnectionError):
        while received := peer.recv(65536):
            protocol.receive_data(received)
            for event in protocol.events_received():
                if isinstance(event, Request):
                    protocol.send_response(protocol.accept(event))
                    protocol.send_binary(encode([CountingBackend().hello]))
            for data in protocol.data_to_send():
                if not data:  # the end of what is to be sent
                    return
                peer.sendall(data)


async def test_a_gateway_that_stood_still_keeps_its_engines(eventually) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_pings, args=(server,))
        thread.start()
        engine = WebSocketEngine("engine", f"127.0.0.1:{server.getsockname()[1]}", None, ping_interval=0.1)
        await eventually(lambda: engine.status.healthy)
        since = engine.status.since
        for _ in range(2):
            time.sleep(0.5)  # noqa: ASYNC251  # the whole process stands still
            await asyncio.sleep(0.15)
        assert engine.status.healthy
        assert engine.status.since == since
        await engine.aclose()
        await asyncio.to_thread(thread.join, 10)


async def test_one_frame_per_tick(serve) -> None:
    async with serve(CountingBackend(), secure=False) as served, raw(served.address) as websocket:
        await websocket.recv()  # Hello, perhaps with the first Load
        await websocket.send(encode([request(f"s{n}", mode="prefill") for n in range(20)]))
        frame = await next_frame(websocket, lambda messages: any(isinstance(m, Tokens) for m in messages))
        assert sum(isinstance(message, Finished) for message in frame) == 20


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(b"\xc1", "malformed frame"), (encode([]) + b"x", "malformed frame"), ("text", "text frame")],
)
async def test_bad_frames_close_with_a_reason(serve, eventually, frame: bytes | str, reason: str) -> None:
    backend = CountingBackend()
    async with serve(backend, secure=False) as served, raw(served.address) as websocket:
        await websocket.send(encode([request(max_tokens=100_000), Takeover("a", [])]))
        await eventually(lambda: backend.live)
        await websocket.send(frame)
        with pytest.raises(ConnectionClosed) as closed:
            await next_frame(websocket, lambda _: False)
        assert reason in closed.value.rcvd.reason
        await eventually(lambda: backend.live == 0)


async def test_unknown_and_doubled_sids(serve) -> None:
    async with serve(CountingBackend(), secure=False) as served, raw(served.address) as websocket:
        await websocket.send(encode([Extend("ghost", [1]), Abort("ghost"), request("d"), request("d")]))
        failed: list[Failed] = []
        while len(failed) < 2:
            failed += [m for m in decode_from_engine(await websocket.recv()) if isinstance(m, Failed)]
        assert [(f.sid, f.status) for f in failed] == [("ghost", 404), ("d", 400)]


async def test_other_version_is_refused_with_a_reason(serve) -> None:
    async with serve(CountingBackend(), secure=False) as served, raw(served.address, "pdrelay.v9") as websocket:
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
        reason = f"session protocol: we speak {VERSIONS}, the client speaks version 9; upgrade the older one"
        assert closed.value.rcvd.reason == reason


async def test_the_highest_version_of_both_is_spoken(serve) -> None:
    later = f"pdrelay.v{VERSIONS.high + 1}"
    async with serve(CountingBackend(), secure=False) as served, raw(served.address, later, *SUBPROTOCOLS) as websocket:
        assert websocket.subprotocol == SUBPROTOCOLS[0]
        (hello, *_) = decode_from_engine(await websocket.recv())
        assert hello.versions == VERSIONS


async def test_slow_reader_is_dropped_and_stalls_nobody(serve, eventually) -> None:
    backend = CountingBackend()
    async with serve(backend, secure=False, max_unsent=2000) as served:
        slow = await upgraded_socket(served.address)
        slow.sendall(client_frame(encode([request("flood", salt="flood")])))
        await eventually(lambda: backend.started == 1)
        engine = WebSocketEngine("engine", served.address, None)
        await eventually(lambda: engine.status.healthy)
        session = engine.open(request(max_tokens=50))
        session.takeover([])
        assert output(await collect(session)) == list(range(50))
        await eventually(lambda: backend.started == 2 and backend.live == 0)
        await engine.aclose()
        slow.close()


async def upgraded_socket(address: str) -> socket.socket:
    """A bare socket after the WebSocket handshake, of which nobody reads."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: {SUBPROTOCOLS[0]}\r\n\r\n".encode()
    )
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_recv(connection, 1)
    return connection


def client_frame(payload: bytes) -> bytes:
    assert len(payload) < 126
    return bytes([0x82, 0x80 | len(payload)]) + bytes(4) + payload


def raw(address: str, *subprotocols: str):
    return connect(f"ws://{address}{PATH}", subprotocols=subprotocols or SUBPROTOCOLS, proxy=None, compression=None)


async def next_frame(websocket, wanted: Callable[[list], bool]) -> list:
    async with asyncio.timeout(5):
        while True:
            messages = decode_from_engine(await websocket.recv())
            if wanted(messages):
                return messages
