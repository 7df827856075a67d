"""Sites of emulated engines on in-memory depots, and what one engine alone gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

import xxhash

from pdrelay.depot.base import EngineDepot, PageKind, Part, Transfer
from pdrelay.depot.memory import MemoryDepot, MemoryDisk
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.emulated.steps import ScaledClock
from pdrelay.engine.emulated.tokens import reference_tokens
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import Open, Sampling, Tokens
from pdrelay.kv.names import PromptPages, Scope, prompt_pages, root
from pdrelay.perf.profile import Profile, load, shipped

PROFILE = load(shipped("tiny-emulated"))
CONTRACT = PROFILE.contract("m")
LAYOUT = CONTRACT.layouts[0]
MAX_MODEL_LEN = 4096


class Site:
    """A datacenter: one depot and its engines."""

    def __init__(
        self, *engines: str, arena: int = 4 << 20, profile: Profile = PROFILE, disk: int = 0, depot: str = "depot"
    ) -> None:
        self.depot = MemoryDepot(depot, arena, disk=MemoryDisk(disk))
        self.control = self.depot.control()
        self.backends = {name: self._backend(name, profile) for name in engines}
        self.engines = {name: LocalEngine(backend) for name, backend in self.backends.items()}

    def _backend(self, name: str, profile: Profile) -> EmulatedBackend:
        def connect() -> EngineDepot:
            return self.depot.engine(name, CONTRACT)

        return EmulatedBackend(
            instance=name, model="m", max_model_len=MAX_MODEL_LEN, profile=profile, control=self.control,
            depot=HostDepot(connect(), connect), publish_decode=name == "MD", adapters={"pirate": "pirate@1"},
            clock=ScaledClock(0),
        )  # fmt: skip

    async def restart(self, name: str) -> None:
        """The engine ends, and comes back with an empty cache of its own."""
        await self.engines[name].aclose()
        await self.backends[name].aclose()
        self.backends[name] = self._backend(name, PROFILE)
        self.engines[name] = LocalEngine(self.backends[name])

    async def aclose(self) -> None:
        for name, engine in self.engines.items():
            await engine.aclose()
            await self.backends[name].aclose()
        await self.control.aclose()


@contextlib.asynccontextmanager
async def sites(*specs: Sequence[str], **options: object) -> AsyncIterator[list[Site]]:
    made = [Site(*spec, **options) for spec in specs]
    try:
        yield made
    finally:
        for site in made:
            await site.aclose()


def pages_of(prompt: list[int]) -> PromptPages:
    key = b"k" * 32
    return prompt_pages(prompt, CONTRACT.page_tokens, root(Scope("m"), key), key)


async def pin(site: Site, prompt: list[int]) -> None:
    """Keeps the prompt's pages, the tail too, as the gateway's transfer does."""
    pages = pages_of(prompt)
    transfer = Transfer(xfer=pages.names[-1].hex(), names=list(pages.names), tails=int(pages.tail is not None))
    await site.control.transfer(transfer)


async def ship(source: Site, target: Site, prompt: list[int], damage: int | None = None) -> None:
    """Copies pages between depots as a transfer does; `damage` flips one byte of one of them."""
    names = pages_of(prompt).names
    await pin(target, prompt)
    sender, receiver = source.depot.engine("sender", CONTRACT), target.depot.engine("receiver", CONTRACT)
    offsets = [page.offset for page in sender.lease("x", names).pages]
    assert len(offsets) == len(names)
    places = receiver.reserve("x", names, [PageKind.PREFIX] * len(names))
    for index, (name, offset, place) in enumerate(zip(names, offsets, places, strict=True)):
        page = bytearray(sender.arena[offset : offset + CONTRACT.page_bytes])
        if index == damage:
            page[12345 % len(page)] ^= 1
        receiver.arena[place : place + len(page)] = page
        slices = [bytes(page[part * LAYOUT.part_bytes :][: LAYOUT.part_bytes]) for part in range(LAYOUT.parts)]
        receiver.publish("x", [Part(name, n, xxhash.xxh3_64_intdigest(data)) for n, data in enumerate(slices)])
    sender.close()
    receiver.release("x")
    receiver.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def sampling_of(max_tokens: int = 40, **options: object) -> Sampling:
    return Sampling(max_tokens=max_tokens, **options)


def reference(prompt: list[int], sampling: Sampling, lora: str = "") -> tuple[list[int], tuple[str, int | None]]:
    ids, stop = reference_tokens(prompt, sampling, PROFILE.vocabulary, MAX_MODEL_LEN, lora)
    return ids, tuple(stop)


async def drain(session, events: list | None = None) -> list:
    async with asyncio.timeout(20):
        return [event async for event in session.events()]


def ids_of(events: list) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def tokens_are_contiguous(events: list) -> bool:
    tokens = [event for event in events if isinstance(event, Tokens)]
    return all(b.index == a.index + len(a.ids) for a, b in itertools.pairwise(tokens))


async def prefill(site: Site, prompt: list[int], sampling: Sampling, sid: str = "p", pinned: bool = True) -> list:
    if pinned:
        await pin(site, prompt)
    request = Open(sid=sid, mode="prefill", prompt=prompt, sampling=sampling)
    return await drain(site.engines["P"].open(request))


def decode_request(prompt: list[int], sampling: Sampling, eager: Sequence[int] = (), sid: str = "d") -> Open:
    names = list(pages_of(prompt).names)
    return Open(sid=sid, mode="decode", prompt=prompt, sampling=sampling, await_names=names, eager=list(eager))


async def decode(engine: LocalEngine, request: Open, chunks: Sequence[Sequence[int]] = ((),)) -> list:
    session = engine.open(request)
    for chunk in chunks[:-1]:
        session.extend(list(chunk))
    session.takeover(list(chunks[-1]))
    return await drain(session)
