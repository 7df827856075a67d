"""Thousands of handoffs on emulated engines, with random timings, failures and cancels: the stream is always right.

Everything is the real code but for sockets: coordinator, request life, engines' session rules, depots and their link.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from pdrelay.cluster.config import Deployment
from pdrelay.depot.memory import MemoryDepot
from pdrelay.depot.memory_link import link
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.emulated.tokens import reference_tokens
from pdrelay.engine.memory import LocalEngine
from pdrelay.engine.messages import Sampling
from pdrelay.errors import EngineUnavailableError, PlacementError
from pdrelay.gateway.base import DebugControls, GenerationRequest
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.perf.profile import load, shipped
from pdrelay.policy.base import Pipeline

PROFILE = load(shipped("tiny-emulated"))
CONTRACT = PROFILE.contract("m")
MAX_MODEL_LEN = 512
AT_ONCE = 8
INSTANCES = {"p-0": ("a", ["prefill"]), "rld-0": ("a", ["relay"]), "md-0": ("b", ["decode"])}


def deployment(handoff: str) -> Deployment:
    return msgspec.convert(
        {
            "fleet_key_file": "k", "model": {"name": "m", "path": "."}, "gateway": {"cluster": "a"},
            "tls": {"directory": "."}, "cluster": [{"name": "a"}, {"name": "b"}],
            "policy": {"handoff": handoff},
            "host": [{"name": f"host-{c}", "cluster": c, "socket": "s", "listen": "127.0.0.1:1"} for c in "ab"],
            "instance": [{"name": name, "cluster": cluster, "roles": roles, "ranks": [{"host": f"host-{cluster}"}],
                          "listen": "127.0.0.1:2"} for name, (cluster, roles) in INSTANCES.items()],
            "link": [{"source": "a", "target": "b", "rtt": "1ms"}],
        },
        Deployment,
    )  # fmt: skip


class ErraticClock:
    """Steps of engines take a few turns of the event loop, now more and now less."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def sleep(self, seconds: float) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)


class World:
    """Two datacenters in one event loop."""

    def __init__(self, rng: random.Random, handoff: str) -> None:
        self.rng = rng
        self.depots = {f"host-{c}": MemoryDepot(f"host-{c}", 1 << 20) for c in "ab"}
        self.line = link(self.depots["host-a"], self.depots["host-b"])
        self.backends = {name: self._backend(name, f"host-{cluster}") for name, (cluster, _) in INSTANCES.items()}
        self.engines = {name: LocalEngine(backend) for name, backend in self.backends.items()}
        controls = {name: depot.control() for name, depot in self.depots.items()}
        self.coordinator = Coordinator(deployment(handoff), self.engines, controls)

    def _backend(self, name: str, host: str) -> EmulatedBackend:
        def connect():
            return self.depots[host].engine(name, CONTRACT)

        return EmulatedBackend(
            instance=name, model="m", max_model_len=MAX_MODEL_LEN, profile=PROFILE,
            control=self.depots[host].control(), depot=HostDepot(connect(), connect),
            publish_decode=name == "md-0", clock=ErraticClock(self.rng),
        )  # fmt: skip

    async def aclose(self) -> None:
        await self.coordinator.aclose()
        for backend in self.backends.values():
            await backend.aclose()

    async def trouble(self) -> None:
        """Kills and revives decode engines and cuts the line, at random."""
        while True:
            for _ in range(self.rng.randrange(400, 2000)):
                await asyncio.sleep(0)
            victim = self.rng.choice(["rld-0", "md-0", "line"])
            if victim == "line":
                self.line.cut()
            else:
                self.engines[victim].kill()
            for _ in range(self.rng.randrange(50)):
                await asyncio.sleep(0)
            if victim == "line":
                self.line.mend()
            else:
                self.engines[victim].revive()


@contextlib.asynccontextmanager
async def world(rng: random.Random, handoff: str) -> AsyncIterator[World]:
    made = World(rng, handoff)
    try:
        yield made
    finally:
        await made.aclose()


async def one(world: World, number: int) -> bool:
    """One request; whether main decode took it over. Every token that is shown must be the reference's, in order."""
    rng = world.rng
    prompt = [rng.randrange(1000, 40000) for _ in range(rng.randrange(2, 70))]
    sampling = Sampling(max_tokens=rng.randrange(1, 24), temperature=0.0, ignore_eos=rng.random() < 0.7)
    truth, _ = reference_tokens(prompt, sampling, PROFILE.vocabulary, MAX_MODEL_LEN)
    # Steps take less than a round here, so Catch-Up by itself rarely finds that it would gain.
    at = rng.choice([None, rng.randrange(1, 12), rng.randrange(1, 12)])
    debug = DebugControls(pipeline=Pipeline.P_RLD_MD, handoff_at=at)
    give_up = rng.randrange(1, 24) if rng.random() < 0.15 else None
    seen: list[int] = []
    try:
        run = world.coordinator.generate(
            GenerationRequest(f"r{number}", time.monotonic(), prompt, sampling, debug=debug)
        )
    except PlacementError:  # an engine is down just now
        await asyncio.sleep(0.001)
        return False
    try:
        async for batch in run:
            assert batch.index == len(seen), "INV-STREAM-1: indices are emitted once, in order"
            seen += batch.ids
            assert seen == truth[: len(seen)]
            if give_up is not None and len(seen) >= give_up:
                break
        else:
            assert seen == truth
    except EngineUnavailableError:
        pass  # more failures than a request survives
    finally:
        await run.aclose()
    return (await run.trace()).handoff_index is not None


async def handoffs(count: int, mode: str, seed: int) -> None:
    done, number = 0, 0

    async def worker(there: World) -> None:
        nonlocal done, number
        while done < count:
            number += 1
            assert number < 20 * count + 100, "most requests are handed over"
            done += await one(there, number)

    async with world(random.Random(seed), mode) as there:
        trouble = asyncio.create_task(there.trouble())
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(worker(there))
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        if not there.line.up:
            there.line.mend()
        for depot in there.depots.values():
            async with asyncio.timeout(30):
                while (held := depot.hub.stats()).leases or held.reserved:
                    depot.tick()
                    await asyncio.sleep(0.01)
            assert (held.pinned, held.reserved, held.leases) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["one_shot", "catch_up", "dynamic"])
async def test_dozens_of_handoffs(mode: str) -> None:
    await handoffs(60, mode, seed=len(mode))


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", ["one_shot", "catch_up", "dynamic"])
async def test_ten_thousand_handoffs(mode: str) -> None:
    await handoffs(3400, mode, seed=1000 + len(mode))
