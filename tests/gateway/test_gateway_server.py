"""The front end on real sockets: official client, curl, clients that leave."""

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import httpx
import openai
import pytest
import uvicorn
import uvloop
from fake_generator import FakeGenerator, Script, batches
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdrelay.errors import EngineUnavailableError
from pdrelay.gateway.app import build_app
from pdrelay.gateway.direct import DirectProtocol
from pdrelay.gateway.serve import server_config
from pdrelay.gateway.text import Text

EOS = 2
SAID = "the quick 你好 fox"


class Recorder(DirectProtocol):
    """Keeps the sockets that the server accepted."""

    accepted: ClassVar[asyncio.Queue[socket.socket]] = asyncio.Queue()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.accepted.put_nowait(transport.get_extra_info("socket"))


@asynccontextmanager
async def serving(generator: FakeGenerator, text: Text) -> AsyncIterator[int]:
    """Serves on a free port, which it gives."""
    config = server_config(build_app(generator, text, "tiny"), "127.0.0.1", 0)
    config.http = Recorder
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    try:
        async with asyncio.timeout(20):
            while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def port(generator: FakeGenerator, text: Text) -> AsyncIterator[int]:
    async with serving(generator, text) as number:
        yield number


@pytest.fixture
def said(text: Text, generator: FakeGenerator) -> str:
    ids = text.encode(SAID, add_special_tokens=False)
    generator.play(ids[:1], ids[1:5], [*ids[5:], EOS])
    return SAID


def ask_openai(port: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20) as client:
        messages = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="tiny", messages=messages)  # type: ignore[arg-type]  # plain dicts
        assert whole.choices[0].message.content == SAID
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        stream = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True},  # type: ignore[arg-type]
            extra_body={"top_k": 5, "pdrelay": {"trace": True}},
        )  # fmt: skip
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
        assert chunks[-1].usage == whole.usage
        assert chunks[-1].model_extra is not None
        assert chunks[-1].model_extra["pdrelay"]["main_instance"] == "m0"
        pieces = list(client.completions.create(model="tiny", prompt="hi", stream=True))
        assert "".join(chunk.choices[0].text for chunk in pieces) == SAID
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="best_of=2 is not supported"):
            client.completions.create(model="tiny", prompt="hi", best_of=2)


async def test_the_official_client(port: int, said: str) -> None:
    await asyncio.to_thread(ask_openai, port)


def fail_in_the_middle(port: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20) as client:
        stream = client.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="m0 is gone"):
            list(stream)


async def test_the_official_client_sees_an_error_in_the_middle(port: int, generator: FakeGenerator) -> None:
    generator.script = Script([*batches([60]), EngineUnavailableError("m0 is gone")])
    await asyncio.to_thread(fail_in_the_middle, port)


async def test_a_response_that_ended_is_freed_without_a_collection(
    port: int, said: str, generator: FakeGenerator
) -> None:
    gc.collect()
    gc.disable()
    earlier = _response_cycles()  # of other servers in this process
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for path in ("chat/completions", "nowhere", "chat/completions"):
                await http.post(f"/v1/{path}", json={"messages": [{"role": "user", "content": "hi"}], "stream": True})
            generator.streams.clear()
            async with asyncio.timeout(5):  # the client has its answer a little before the server is done
                while len(_response_cycles()) - len(earlier) > 1:  # noqa: ASYNC110  # the connection keeps its last
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


def _response_cycles() -> list[RequestResponseCycle]:
    return [each for each in gc.get_objects() if type(each) is RequestResponseCycle]  # others may warn when asked


@pytest.mark.parametrize("stream", [False, True])
async def test_curl(port: int, said: str, stream: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream})
    curl = await asyncio.create_subprocess_exec(
        "curl", "-sSN", "--max-time", "20", f"http://127.0.0.1:{port}/v1/chat/completions",
        "-H", "content-type: application/json", "-d", body, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    shown, _ = await curl.communicate()
    assert curl.returncode == 0
    if stream:
        assert shown.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(shown)["choices"][0]["message"]["content"] == said


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
loops = pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])


@loops
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 1])
@pytest.mark.parametrize("padding", [0, 300_000])  # so long a body stops the reading
def test_a_client_that_leaves_ends_the_request(
    text: Text, loop: Callable[[], asyncio.AbstractEventLoop], stream: bool, tokens_before: int, padding: int
) -> None:
    async def scene() -> None:
        generator = FakeGenerator()
        async with serving(generator, text) as port:
            await leave(port, generator, stream, tokens_before, padding)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())


async def leave(port: int, generator: FakeGenerator, stream: bool, tokens_before: int, padding: int) -> None:
    never = asyncio.Event()
    generator.script = Script([*batches(*[[60]] * tokens_before), never])
    body = json.dumps({"prompt": "hi", "stream": stream}).encode() + b" " * padding
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    async with asyncio.timeout(10):
        if stream and tokens_before:
            await reader.readuntil(b'"text":')
        await generator.started.wait()
        assert not generator.streams[0].closed.is_set()
        writer.close()
        await writer.wait_closed()
        await generator.streams[0].closed.wait()


async def test_a_slow_reader_does_not_stop_others(port: int, generator: FakeGenerator, text: Text) -> None:
    ids = text.encode("the quick brown fox " * 20, add_special_tokens=False)
    generator.max_model_len = 1 << 20
    generator.script = Script(batches(*([token] for token in ids * 40)))
    body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 1 << 19}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    _, slow = await asyncio.open_connection("127.0.0.1", port)
    slow.write(request)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        while b"[DONE]" not in await reader.readline():
            pass
        for connection in (slow, writer):
            connection.close()
            await connection.wait_closed()
        for stream in generator.streams:
            await stream.closed.wait()


@loops
def test_tokens_are_not_held_back_in_the_kernel(text: Text, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scene() -> None:
        async with serving(FakeGenerator(), text) as port:
            await look_at_accepted_socket(port)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scene())


async def look_at_accepted_socket(port: int) -> None:
    Recorder.accepted = asyncio.Queue()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        accepted = await Recorder.accepted.get()
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()
    await writer.wait_closed()
