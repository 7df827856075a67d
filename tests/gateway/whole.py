"""A whole deployment in one process: emulated engines on in-memory depots, behind the real coordinator.

dc-a: host-a with p-0 and rld-0      dc-b: host-b with md-0
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from pdrelay.cluster.config import Deployment
from pdrelay.depot.base import PageKind
from pdrelay.depot.memory import MemoryDepot
from pdrelay.depot.memory_link import link
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.emulated.pages import write_parts
from pdrelay.engine.emulated.steps import Clock, ScaledClock
from pdrelay.engine.emulated.tokens import reference_tokens
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import Sampling
from pdrelay.gateway.base import DebugControls, GenerationRequest, TokenBatch
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.kv.names import PromptPages, Scope, prompt_pages, root
from pdrelay.perf.profile import Profile, load, shipped
from pdrelay.policy.base import Pipeline

PROFILE = load(shipped("tiny-emulated"))
MAX_MODEL_LEN = 4096
CONTRACT = PROFILE.contract("m")
HOSTS = {"p-0": "host-a", "rld-0": "host-a", "md-0": "host-b"}
ROLES = {"p-0": "prefill", "rld-0": "relay", "md-0": "decode"}
_ids = count()


def deployment(**policy: Any) -> Deployment:
    clusters = {"host-a": "dc-a", "host-b": "dc-b"}
    instances = [
        {"name": name, "cluster": clusters[host], "roles": [ROLES[name]], "ranks": [{"host": host}],
         "listen": f"127.0.0.1:{port}", "engine": "emulated", "profile": "p"}
        for port, (name, host) in enumerate(HOSTS.items(), 1)
    ]  # fmt: skip
    hosts = [
        {"name": host, "cluster": cluster, "socket": host, "listen": "127.0.0.1:9"}
        for host, cluster in clusters.items()
    ]
    fields = {
        "fleet_key_file": "k", "model": {"name": "m", "path": ".", "max_model_len": MAX_MODEL_LEN},
        "gateway": {"cluster": "dc-a", "debug": True}, "tls": {"directory": "."}, "policy": policy,
        "cluster": [{"name": "dc-a"}, {"name": "dc-b"}], "host": hosts, "instance": instances,
        "link": [{"source": "dc-a", "target": "dc-b", "rate": "1gbit", "rtt": "0ms"}],
    }  # fmt: skip
    return msgspec.convert(fields, Deployment)


class Whole:
    """Construct inside a running loop, by `running`."""

    def __init__(
        self, *, clocks: Mapping[str, Clock], held_line: bool, profile: Profile, policy: dict[str, Any]
    ) -> None:
        self.registry = CollectorRegistry()
        self.depots = {name: MemoryDepot(name, 16 << 20) for name in ("host-a", "host-b")}
        self.line = link(self.depots["host-a"], self.depots["host-b"], stepped=held_line)
        self.backends = {name: self._backend(name, profile, clocks.get(name)) for name in HOSTS}
        self.engines = {name: LocalEngine(backend) for name, backend in self.backends.items()}
        depots = {name: depot.control() for name, depot in self.depots.items()}
        self.coordinator = Coordinator(deployment(**policy), self.engines, depots, registry=self.registry)

    def _backend(self, name: str, profile: Profile, clock: Clock | None) -> EmulatedBackend:
        depot = self.depots[HOSTS[name]]

        def connect():
            return depot.engine(name, CONTRACT)

        return EmulatedBackend(
            instance=name, model="m", max_model_len=MAX_MODEL_LEN, profile=profile, control=depot.control(),
            depot=HostDepot(connect(), connect), publish_decode=name == "md-0", clock=clock or ScaledClock(0),
        )  # fmt: skip

    async def aclose(self) -> None:
        await self.coordinator.aclose()
        for backend in self.backends.values():
            await backend.aclose()

    def request(
        self, prompt: list[int], sampling: Sampling, *, pipeline: Pipeline | None = None, at: int | None = None,
        mode: Any = None,
    ) -> GenerationRequest:  # fmt: skip
        debug = DebugControls(pipeline, mode, at)
        return GenerationRequest(f"r-{next(_ids)}", time.monotonic(), prompt, sampling, debug=debug)

    async def ids(self, request: GenerationRequest) -> list[int]:
        """Runs a request to its end; its output."""
        return [token for batch in await self.batches(request) for token in batch.ids]

    async def batches(self, request: GenerationRequest) -> list[TokenBatch]:
        run = self.coordinator.generate(request)
        try:
            async with asyncio.timeout(30):
                return [batch async for batch in run]
        finally:
            await run.aclose()

    def plant_wrong_pages(self, prompt: list[int]) -> None:
        """Puts pages at main decode's depot whose bytes are not what their names say, with checksums that fit."""
        depot = self.depots["host-b"].engine("md-0", CONTRACT)
        names = pages_of(prompt).full
        offsets = depot.reserve("wrong", names, [PageKind.PREFIX] * len(names))
        for name, offset in zip(names, offsets, strict=True):
            assert offset is not None
            parts = write_parts(depot.arena, offset, CONTRACT, name, range(CONTRACT.groups[0].layers), b"other bytes")
            depot.publish("wrong", parts)
        depot.release("wrong")
        depot.close()

    def idle(self) -> bool:
        """Whether no engine runs or holds anything, and no depot holds anything for a request."""
        free = all(not (load := backend.load()).running and not load.waiting and not load.kv_usage
                   for backend in self.backends.values())  # fmt: skip
        stats = [depot.hub.stats() for depot in self.depots.values()]
        return free and not any(s.leases or s.transfers or s.reserved or s.pinned for s in stats)


@contextlib.asynccontextmanager
async def running(
    *, clocks: Mapping[str, Clock] = MappingProxyType({}), held_line: bool = False, profile: Profile = PROFILE,
    **policy: Any,
) -> AsyncIterator[Whole]:  # fmt: skip
    """`clocks` of instances instead of time that does not pass; on a held line nothing arrives."""
    whole = Whole(clocks=clocks, held_line=held_line, profile=profile, policy=policy)
    try:
        yield whole
    finally:
        await whole.aclose()


def pages_of(prompt: list[int]) -> PromptPages:
    key = b"k" * 32
    return prompt_pages(prompt, CONTRACT.page_tokens, root(Scope("m"), key), key)


def prompt_of(length: int, seed: object = 0) -> list[int]:
    return random.Random(str(seed)).choices(range(1000, 40000), k=length)


def reference(prompt: list[int], sampling: Sampling) -> list[int]:
    """What one engine alone answers."""
    return reference_tokens(prompt, sampling, PROFILE.vocabulary, MAX_MODEL_LEN)[0]


async def eventually(condition, seconds: float = 5.0) -> float:
    """Waits until `condition()` holds; how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "timed out"
        await asyncio.sleep(0.001)
    return time.monotonic() - start
