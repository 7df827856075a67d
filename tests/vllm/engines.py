"""What the tests of the vLLM engine share: a depot, engines on it, sessions run to their end, reference runs."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from adapter import RANK

from pdrelay.depot.arena import Arena
from pdrelay.depot.base import DepotStats
from pdrelay.depot.hub import Hub
from pdrelay.depot.server import DepotServer
from pdrelay.engine.base import Chunk, SessionEvent
from pdrelay.engine.logprobs import Row
from pdrelay.engine.messages import Extend, Extended, Finished, Open, Opened, Prefilled, Sampling, Takeover, Tokens
from pdrelay.kv.names import PromptPages, Scope, prompt_pages, root

T = TypeVar("T")
KEY = b"k" * 32
PAGE_TOKENS = 32
MODEL = "smol"
ADAPTER = "pirate"
ADAPTERS = {ADAPTER: "pirate@1"}
"""What stands for it in page names."""
TEXT = (
    "The history of the Roman Empire begins with the founding of the city. Once upon a time there was a small village "
    "near the river where people lived for many years, and every spring the water rose over the fields. "
)
_numbers = count()


class DepotThread:
    """A depot on a thread of its own: starting an engine blocks the loop of the tests."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    def start(self) -> None:
        self._call(self._start())

    def stop(self) -> None:
        """Closes every connection, as a crash would."""
        self._call(self._server.aclose())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stats(self) -> DepotStats:
        async def ask() -> DepotStats:
            return self._server.hub.stats()

        return self._call(ask())

    def evict(self) -> None:
        """Drops every page that nothing pins."""

        async def drop() -> None:
            index = self._server.hub.index
            index.evict_all({page.layout for page in index})
            self._server.hub.settle()

        self._call(drop())

    def page(self, name: bytes) -> bytes:
        """The bytes of a complete page."""

        async def read() -> bytes:
            page = self._server.hub.index.get(name)
            assert page is not None
            assert page.complete
            return bytes(self._server.arena.view[page.offset : page.offset + page.layout.page_bytes])

        return self._call(read())

    def flip(self, name: bytes, part: int) -> None:
        """Flips one bit of a complete page."""

        async def flip() -> None:
            page = self._server.hub.index.get(name)
            assert page is not None
            self._server.arena.view[page.offset + part * page.layout.part_bytes + 999] ^= 8

        self._call(flip())

    def holds(self, names: Sequence[bytes]) -> list[bool]:
        async def look() -> list[bool]:
            return [self._server.hub.index.complete(name) for name in names]

        return self._call(look())

    def pin(self, owner: str, names: Sequence[bytes]) -> None:
        """Pins names, as a transfer does before their pages exist."""

        async def pin() -> None:
            self._server.hub.index.pin(owner, names)

        self._call(pin())

    def unpin(self, owner: str) -> None:
        async def unpin() -> None:
            self._server.hub.index.release(owner)
            self._server.hub.settle()

        self._call(unpin())

    async def _start(self) -> None:
        arena = Arena(self.capacity)
        self._server = DepotServer(Hub("here", arena.view, KEY, time.monotonic), arena)
        await self._server.start(self.path)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


@dataclass
class Run:
    """The events of a session."""

    events: list[SessionEvent] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        batches = [event for event in self.events if isinstance(event, Tokens)]
        for before, after in pairwise(batches):
            assert after.index == before.index + len(before.ids)
        return [token for batch in batches for token in batch.ids]

    @property
    def rows(self) -> list[Row]:
        """Log probabilities of `ids`."""
        return [row for event in self.events if isinstance(event, Tokens) and event.logprobs
                for row in event.logprobs.rows()]  # fmt: skip

    @property
    def prefilled(self) -> Prefilled:
        first = next(event for event in self.events if isinstance(event, Tokens))
        assert first.prefilled is not None
        return first.prefilled

    @property
    def prompt_rows(self) -> list[Row]:
        assert self.prefilled.logprobs is not None
        return self.prefilled.logprobs.rows()

    @property
    def opened(self) -> Opened:
        return next(event for event in self.events if isinstance(event, Opened))

    @property
    def predictions(self) -> list[int]:
        return [event.prediction for event in self.events if isinstance(event, Opened | Extended)]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]


class Engine:
    """A vLLM engine in processes of its own, with our backend on it."""

    def __init__(self, name: str, depot: DepotThread, adapter: Path | None = None, **options: object) -> None:
        self.name, self.depot, self._adapter = name, depot, adapter
        own = {"instance": name, "depot_socket": str(depot.path), "model": MODEL}
        own |= {setting: options.pop(setting) for setting in ("publish_decode", "shards") if setting in options}
        if adapter is not None:
            own["adapters"] = ADAPTERS
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
        self.llm = _start(own, options)

    async def connect(self) -> None:
        from vllm.lora.request import LoRARequest

        from pdrelay.engine.vllm.plugin import backend_of

        self.loras = {ADAPTER: LoRARequest(ADAPTER, 1, str(self._adapter))} if self._adapter is not None else {}
        self.backend = await backend_of(self.llm, loras=self.loras)
        self.control = self.backend._depot
        self.tokenizer = None if self.llm.model_config.skip_tokenizer_init else self.llm.get_tokenizer()

    async def aclose(self) -> None:
        await self.control.aclose()
        left_open = self.llm.engine_core.resources.ctx  # vLLM leaves it to the garbage collector, which warns
        await asyncio.to_thread(self.llm.shutdown)
        left_open.destroy(linger=0)
        del self.llm, self.backend, self.tokenizer

    async def run(self, request: Open, *chunks: Chunk, into: Run | None = None) -> Run:
        async def feed() -> AsyncIterator[Chunk]:
            for chunk in chunks:
                yield chunk

        run = into or Run()
        async with asyncio.timeout(60):
            await self.backend.run(request, feed(), run.events.append)
        return run

    async def prefill(self, prompt: list[int], sampling: Sampling | None = None, salt: str = "", lora: str = "") -> Run:
        request = Open(
            sid=_sid(), mode="prefill", prompt=prompt, sampling=sampling or Sampling(max_tokens=8, temperature=0),
            cache_salt=salt, lora=lora,
        )  # fmt: skip
        return await self.run(request)

    async def decode(
        self,
        prompt: list[int],
        sampling: Sampling,
        chunks: Sequence[list[int]],
        eager: Sequence[int] = (),
        lora: str = "",
    ) -> Run:
        """A session whose last chunk takes over."""
        sid = _sid()
        extends: list[Chunk] = [Extend(sid, ids) for ids in chunks[:-1]]
        request = Open(sid=sid, mode="decode", prompt=prompt, sampling=sampling, eager=list(eager), lora=lora)
        return await self.run(request, *extends, Takeover(sid, list(chunks[-1])))

    async def reference(self, prompt: list[int], sampling: Sampling, lora: str = "") -> list[int]:
        """The uninterrupted run of the same engine."""
        from pdrelay.engine.vllm.sampling import to_vllm

        ids: list[int] = []
        params = to_vllm(sampling, sampling.max_tokens)
        told = {"type": "token", "prompt_token_ids": prompt}
        async for output in self.llm.generate(told, params, _sid(), lora_request=self.loras.get(lora)):
            ids += output.outputs[0].token_ids
        return ids

    async def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        deadline = time.monotonic() + 10
        while not await self.llm.reset_prefix_cache():
            assert time.monotonic() < deadline, "requests keep their blocks"
            await asyncio.sleep(0.05)

    def tokens(self, count: int, start: str = "") -> list[int]:
        """A prompt of `count` tokens that no other `start` shares a page with."""
        if self.tokenizer is None:
            vocabulary = self.llm.model_config.get_vocab_size()
            return [*Random(start).choices(range(3, vocabulary), k=count)]
        ids: list[int] = self.tokenizer.encode(start + TEXT * (count // 40 + 1))
        return ids[:count]


@asynccontextmanager
async def started(*makers: Callable[[], Engine]) -> AsyncIterator[list[Engine]]:
    """Engines that start, and end, at the same time: most of a start is imports, in a process of its own."""
    with ThreadPoolExecutor(len(makers)) as pool:
        engines = list(pool.map(lambda make: make(), makers))
    for engine in engines:
        await engine.connect()
    yield engines
    await asyncio.gather(*(engine.aclose() for engine in engines))


async def at_once(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All results, once all are there: a step of an engine takes about as long for one sequence as for eight."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


def pages(prompt: list[int], salt: str = "", lora: str = "") -> PromptPages:
    """Names of a prompt's pages."""
    scope = Scope(MODEL, lora=ADAPTERS.get(lora, ""), cache_salt=salt)
    return prompt_pages(prompt, PAGE_TOKENS, root(scope, KEY), KEY)


def _sid() -> str:
    return f"s{next(_numbers)}"


def _start(own: dict[str, object], options: dict[str, object]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = {
            "served_model_name": MODEL,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": PAGE_TOKENS,
            "enforce_eager": True,
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "scheduler_cls": "pdrelay.engine.vllm.scheduler.PdrelayScheduler",
            "worker_cls": "pdrelay.engine.vllm.worker.PdrelayCPUWorker",
            "worker_extension_cls": "pdrelay.engine.vllm.extension.WorkerExtension",
            "kv_transfer_config": KVTransferConfig(
                kv_connector="PdrelayConnector",
                kv_connector_module_path="pdrelay.engine.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=own,
            ),
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | options)))
