"""The short way of tokens past the queues: the same tokens, in the same order, whenever nothing is to be decided."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_generator import Diverted, FakeGenerator, Script, batches
from scripted import Scene, ScriptedEngine
from test_gateway_server import serving

from pdrelay.engine.base import EngineStatus
from pdrelay.engine.messages import Load
from pdrelay.gateway.base import Tier, TokenBatch
from pdrelay.gateway.text import Text
from pdrelay.policy.base import Pipeline

EOS = 2


class KeptSink:
    def __init__(self, scene: Any) -> None:
        self.ready, self.taken, self.fails = True, [], False
        self._seen = scene.seen

    def take(self, index: int, ids: list[int]) -> bool:
        if self.fails:
            raise ValueError("a broken sink")
        if not self.ready:
            return False
        assert index == len(self._seen)
        self._seen += ids
        self.taken.append((index, ids))
        return True


async def main_decodes(scene: Any) -> KeptSink:
    """Brings a P-MD request to where main decode's tokens change nothing."""
    sink = KeptSink(scene)
    scene.run.divert(sink)
    await scene.prefill()
    scene.md.last.opened()
    scene.md.last.tokens(1, 101)
    await scene.settle()
    return sink


async def test_tokens_of_main_decode_go_to_the_sink_while_nothing_is_to_be_decided():
    async with Scene(Pipeline.P_MD) as scene:
        sink = await main_decodes(scene)
        assert (scene.seen, sink.taken) == ([100, 101], [])
        scene.md.last.tokens(2, 102)
        scene.md.last.tokens(3, 103, 104)
        assert sink.taken == [(2, [102]), (3, [103, 104])]  # at once: nobody ran in between
        scene.md.last.tokens(5, 105, last=True)
        scene.md.last.finished("length")
        await scene.settle()
        assert (scene.seen, scene.error) == ([100, 101, 102, 103, 104, 105], None)
        assert (await scene.run.trace()).token_ids == scene.seen


async def test_tokens_wait_their_turn_behind_what_the_sink_did_not_take():
    async with Scene(Pipeline.P_MD) as scene:
        sink = await main_decodes(scene)
        sink.ready = False
        scene.md.last.tokens(2, 102)
        sink.ready = True
        scene.md.last.tokens(3, 103)  # the one before is not through yet
        await scene.settle()
        assert (scene.seen, sink.taken) == ([100, 101, 102, 103], [])
        scene.md.last.tokens(4, 104)
        assert sink.taken == [(4, [104])]


async def relay_decodes(scene: Any) -> KeptSink:
    """Brings a relayed request to where main decode has not got its pages yet."""
    sink = KeptSink(scene)
    scene.run.divert(sink)
    await scene.prefill()
    scene.rld.last.opened()
    scene.rld.last.tokens(1, 101)
    await scene.settle()
    scene.rld.last.tokens(2, 102)
    return sink


async def test_tokens_of_the_relay_go_to_the_sink_until_main_decode_is_ready():
    async with Scene() as scene:
        sink = await relay_decodes(scene)
        scene.rld.last.tokens(3, 103, 104)
        assert sink.taken == [(2, [102]), (3, [103, 104])]
        scene.md.last.opened()
        scene.rld.last.tokens(5, 105)  # in the same moment
        await scene.settle()
        assert scene.md.last.takeovers == [[100, 101, 102, 103, 104]]
        scene.md.last.tokens(5, 105, last=True)
        scene.md.last.finished("length")
        await scene.settle()
        assert scene.seen == [100, 101, 102, 103, 104, 105]
        assert len(sink.taken) == 2
        trace = await scene.run.trace()
        assert (trace.prefill_tokens, trace.relay_tokens, trace.main_tokens) == (1, 4, 1)


async def test_a_relay_that_is_to_stop_somewhere_is_watched_token_by_token():
    async with Scene(handoff_at=4) as scene:
        sink = await relay_decodes(scene)
        scene.rld.last.tokens(3, 103, 104)
        await scene.settle()
        assert (scene.seen, sink.taken) == ([100, 101, 102, 103], [])


async def test_a_relay_under_pressure_is_watched_token_by_token(monkeypatch: pytest.MonkeyPatch):
    full = EngineStatus(True, 0.0, "", None, Load(running=9, waiting=0, kv_usage=0.96))
    monkeypatch.setattr(ScriptedEngine, "status", full)
    async with Scene() as scene:
        sink = await relay_decodes(scene)
        assert (scene.seen, sink.taken) == ([100, 101], [])
        await scene.settle()
        assert scene.seen == [100, 101, 102]


async def test_a_broken_sink_fails_its_request_and_no_other():
    async with Scene(Pipeline.P_MD) as scene:
        sink = await main_decodes(scene)
        sink.fails = True
        scene.md.last.tokens(2, 102)
        await scene.settle()
        assert isinstance(scene.error, ValueError)


async def test_a_client_gets_both_ways_in_order(generator: FakeGenerator, text: Text):
    said = "the quick 你好 fox jumps"
    ids = text.encode(said, add_special_tokens=False)
    first, *rest = batches(ids[:1], ids[1:2])
    direct = [Diverted(2 + at, [token]) for at, token in enumerate(ids[2:-1])]
    last = TokenBatch(len(ids) - 1, [ids[-1], EOS], Tier.MAIN)
    generator.script = Script([first, *rest, *direct, last])
    async with serving(generator, text) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with asyncio.timeout(20), client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert (await client.get("/health")).status_code in (200, 503)  # the connection is in order
        tokens = (await client.get("/metrics")).text
    assert lines[-1] == "data: [DONE]"
    chunks = [httpx.Response(200, content=line.removeprefix("data: ")).json() for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said
    assert generator.streams[0].diverted == len(direct)
    # What goes straight is whose the latest was.
    assert f'pdrelay_gateway_generation_tokens_total{{tier="relay"}} {len(ids) - 2}.0' in tokens
    assert 'pdrelay_gateway_generation_tokens_total{tier="main"} 2.0' in tokens
