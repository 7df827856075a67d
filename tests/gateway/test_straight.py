"""The short way of tokens past the queues: the same tokens, in the same order, whenever nothing is to be decided."""

import asyncio
from typing import Any

import httpx
from fake_generator import Diverted, FakeGenerator, Script, batches
from scripted import Scene
from test_gateway_server import serving

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


async def test_tokens_of_the_relay_never_take_the_short_way():
    async with Scene() as scene:
        sink = KeptSink(scene)
        scene.run.divert(sink)
        await scene.prefill()
        scene.rld.last.opened()
        scene.rld.last.tokens(1, 101)
        await scene.settle()
        scene.rld.last.tokens(2, 102)
        await scene.settle()
        assert (scene.seen, sink.taken) == ([100, 101, 102], [])


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
    first, *rest = batches(ids[:2])
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
    assert f'pdrelay_gateway_generation_tokens_total{{tier="main"}} {len(ids) - 1}.0' in tokens
