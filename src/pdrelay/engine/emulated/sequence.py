"""One request inside the emulated engine: its tokens, its pages, and what of them is computed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdrelay.depot.base import PageKind, Use
from pdrelay.depot.checksums import unpack_checksums, wrong_parts
from pdrelay.engine.emulated.host_depot import DepotConnection
from pdrelay.engine.emulated.kv_memory import Claim, KvMemory
from pdrelay.engine.emulated.pages import RIGHT, combine, read_drift, write_parts
from pdrelay.engine.emulated.steps import StepLoop
from pdrelay.engine.emulated.tokens import Output
from pdrelay.engine.messages import Open
from pdrelay.errors import EngineRejectedError
from pdrelay.kv.contract import KVContract
from pdrelay.kv.names import Scope, extend_pages, prompt_pages, root
from pdrelay.perf.profile import Profile

MAX_TOKEN_ID = 2**31
OnPage = Callable[[bytes, bytes], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What all sequences of an engine share."""

    profile: Profile
    contract: KVContract
    max_model_len: int
    memory: KvMemory
    steps: StepLoop
    adapters: Mapping[str, str]  # by name, and what stands for each in page names


class Running:
    """One request. `close` lets go of all it holds, whatever state it is in."""

    def __init__(self, parts: EngineParts, depot: DepotConnection, request: Open, owner: str) -> None:
        self._parts, self._depot, self._owner = parts, depot, owner
        self._check(request)
        self._key = key = depot.fleet_key
        self._root = root(self._scope(request), key)
        self._prompt = prompt_pages(request.prompt, parts.contract.page_tokens, self._root, key)
        self.output = Output(
            parts.profile.vocabulary, request.prompt, request.sampling, parts.max_model_len, request.lora
        )
        self.output.append(request.eager)
        self._full = list(self._prompt.full)  # names of whole pages, the output's included as they fill
        self._claim: Claim | None = None
        self._drift = RIGHT
        self._offsets: list[int | None] = [None] * len(self._prompt.names)  # prompt pages that we are to write
        self._drifts: list[bytes] = []  # of the prompt's pages that were cached or loaded
        self.computed = 0  # tokens whose KV is here
        self.cached_tokens = 0
        self.loaded_tokens = 0
        self._from_disk: list[int] = []  # loaded pages that the depot had brought back from disk
        self.on_decode_page: OnPage | None = None  # told name and drift of each page that the output filled

    async def admit(self, output_tokens: int) -> None:
        """Waits for room for the prompt and so many output tokens. Raises EngineRejectedError when there is never."""
        tokens = min(self._prompt.length + output_tokens, self._parts.max_model_len)
        pages = -(-tokens // self._parts.contract.page_tokens)
        memory = self._parts.memory
        if pages > memory.capacity:
            raise EngineRejectedError(f"the request needs {pages} pages of KV memory, the engine has {memory.capacity}")
        self._claim = await memory.admit(pages)

    async def load(self) -> None:
        """Takes what the engine's own cache has of the prompt, then what the depot has of the rest."""
        self._drifts = self._parts.memory.use_cached(self._held_claim(), self._full[: self._reusable_pages()])
        cached = len(self._drifts)
        self._drifts += await self._load_pages(self._prompt.names[cached:])
        self._drift = functools.reduce(combine, self._drifts, RIGHT)
        self.cached_tokens = self._prompt.tokens_in(cached)
        self.computed = self._prompt.tokens_in(len(self._drifts))
        self.loaded_tokens = self.computed - self.cached_tokens
        from_disk = sum(self._prompt.tokens_in(index + 1) - self._prompt.tokens_in(index) for index in self._from_disk)
        use = Use(
            requests=1,
            own=self.cached_tokens,
            arena=self.loaded_tokens - from_disk,
            disk=from_disk,
            computed=self._prompt.length - self.computed,
        )
        self._depot.report_use(use)

    async def _load_pages(self, names: Sequence[bytes]) -> list[bytes]:
        """Loads the leading `names` that the depot has, up to one with bytes that do not fit; their drifts."""
        if not names:
            return []
        drifts: list[bytes] = []
        for name, page in zip(names, await self._depot.lease_patiently(self._owner, names), strict=False):
            if wrong_parts(self._page(page.offset), unpack_checksums(page.checksums)):
                await self._depot.corrupt(self._owner, [name])
                break
            drift = read_drift(self._depot.arena, page.offset, self._parts.contract, name)
            drifts.append(drift)
            if page.from_disk:
                self._from_disk.append(self._prompt.names.index(name))
            if name != self._prompt.tail:
                self._parts.memory.store(self._held_claim(), name, drift)
            await asyncio.sleep(0)  # a page takes a while to read: others get their turn
        # The lease ends when the pages are loaded; nobody waits for room while holding one.
        await self._depot.release(self._owner)
        return drifts

    def _page(self, offset: int) -> memoryview:
        return self._depot.arena[offset : offset + self._parts.contract.page_bytes]

    async def reserve(self) -> None:
        """Becomes the writer of the prompt pages that the depot lacks, and writes those that the engine has."""
        names = self._prompt.names
        kinds = [PageKind.TRANSFER if name == self._prompt.tail else PageKind.PREFIX for name in names]
        self._offsets = await self._depot.reserve_patiently(self._owner, names, kinds)
        for index, drift in enumerate(self._drifts[: self._reusable_pages()]):
            self._write(index, 0, self._parts.profile.kv.layers, drift)

    async def compute_prompt(self) -> None:
        """Computes what is missing of the prompt, publishing reserved pages layer by layer."""
        known = min(self.computed, self._prompt.length - 1)
        start = self.computed = known

        def on_slice(done: int, first: int, last: int) -> None:
            for index in range(self._pages_ended(self.computed), self._pages_ended(start + done)):
                self._write(index, first, last, self._drift)
            if last == self._parts.profile.kv.layers:
                self._reach(start + done)

        await self._parts.steps.prefill(self._prompt.length - known, known, on_slice)

    async def compute_known(self) -> None:
        """Computes all known tokens: prompt and output; at least the last one, whose logits are wanted."""
        total = len(self.output.token_ids)
        if self.computed < self._prompt.length - 1:
            await self.compute_prompt()
            if self.computed == total:
                return
        context = min(self.computed, total - 1)
        await self._parts.steps.extend(total - context, context)
        self._reach(total)

    def take(self, ids: list[int]) -> None:
        """Takes output tokens of another engine. Raises EngineRejectedError."""
        self._check_ids(ids)
        if self.output.count + len(ids) > self.output.limit:
            raise EngineRejectedError(f"more than the {self.output.limit} output tokens that the request may have")
        self.output.append(ids)

    async def extend(self, ids: list[int]) -> None:
        """Takes output tokens of another engine and computes their KV. Raises EngineRejectedError."""
        self.take(ids)
        if ids:
            await self.compute_known()

    def step(self) -> None:
        """A decode step computed the KV of the newest token."""
        self._reach(self.computed + 1)

    @property
    def drift(self) -> bytes:
        """What is wrong with the KV; RIGHT when nothing is."""
        return self._drift

    async def close(self) -> None:
        """Frees everything. Idempotent."""
        claim, self._claim = self._claim, None
        if claim is not None:
            self._parts.memory.release(claim)
        await self._depot.release(self._owner)

    def _write(self, index: int, first: int, last: int, drift: bytes) -> None:
        offset = self._offsets[index]
        if offset is not None:
            depot, contract, name = self._depot, self._parts.contract, self._prompt.names[index]
            depot.publish(self._owner, write_parts(depot.arena, offset, contract, name, range(first, last), drift))

    def _reach(self, computed: int) -> None:
        """The KV of `computed` tokens is here: whole pages enter the cache."""
        page_tokens = self._parts.contract.page_tokens
        before, after = self.computed // page_tokens, computed // page_tokens
        self.computed = computed
        if after > len(self._full):
            known = self.output.token_ids[: after * page_tokens]
            self._full += extend_pages(self._full, known, page_tokens, self._root, self._key)
        for index in range(before, after):
            self._parts.memory.store(self._held_claim(), self._full[index], self._drift)
            if index >= len(self._prompt.full) and self.on_decode_page is not None:
                self.on_decode_page(self._full[index], self._drift)

    def _pages_ended(self, tokens: int) -> int:
        """Pages of the prompt that end within its first `tokens` tokens."""
        return len(self._prompt.names) if tokens == self._prompt.length else tokens // self._prompt.page_tokens

    def _reusable_pages(self) -> int:
        """Pages of the prompt that need not be computed: the last token always is, because its logits are wanted."""
        return (self._prompt.length - 1) // self._prompt.page_tokens

    def _held_claim(self) -> Claim:
        assert self._claim is not None, "not admitted"
        return self._claim

    def _scope(self, request: Open) -> Scope:
        contract, adapters = self._parts.contract, self._parts.adapters
        if request.lora and request.lora not in adapters:
            served = ", ".join(adapters) or "none"
            raise EngineRejectedError(f"the engine has no adapter {request.lora!r}; it has {served}", 503)
        return Scope(contract.model, contract.revision, adapters.get(request.lora, ""), request.cache_salt)

    def _check(self, request: Open) -> None:
        if not request.prompt:
            raise EngineRejectedError("the prompt is empty")
        known, limit = len(request.prompt) + len(request.eager), self._parts.max_model_len
        if known >= limit:
            raise EngineRejectedError(f"{known} tokens leave no room in a context of {limit}")
        if request.sampling.max_tokens < max(1, len(request.eager)):
            raise EngineRejectedError(f"max_tokens is {request.sampling.max_tokens}, expected 1 and no less than eager")
        if request.sampling.structured is not None:
            raise EngineRejectedError("an emulated engine makes random tokens: it cannot follow a grammar")
        self._check_ids(request.prompt)
        self._check_ids(request.eager)

    def _check_ids(self, ids: list[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < MAX_TOKEN_ID), None)
        if wrong is not None:
            raise EngineRejectedError(f"{wrong} is not a token id")
