"""Instances and depots of a simulated deployment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdrelay.perf.profile import ForwardCost
from pdrelay.policy.base import InstanceView
from pdrelay.sim.cache import BlockCache, BlockIndex
from pdrelay.sim.engine import Engine
from pdrelay.sim.events import Events
from pdrelay.sim.scenario import InstanceSpec


class Depot:
    """A host's arena: prefix blocks, and the pages of requests under way, which are pinned.

    INV-SIM-DEPOT-1: what is pinned never exceeds the arena.
    """

    def __init__(self, index: BlockIndex, capacity: float) -> None:
        self.cache = BlockCache(index, capacity)
        self.capacity = capacity
        self.pinned = 0.0
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    def pin(self, size: float, then: Callable[[], None]) -> None:
        """Calls `then` as soon as `size` bytes are pinned, in the order of asking."""
        self._waiting.append((size, then))
        self._admit()

    def unpin(self, size: float) -> None:
        """Gives `size` bytes back."""
        self.pinned -= size
        self.cache.unpin(size)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.cache.has_room(self._waiting[0][0]):
            size, then = self._waiting.popleft()
            self.pinned += size
            self.cache.pin(size)
            assert self.pinned <= self.capacity * (1 + 1e-9), "INV-SIM-DEPOT-1"
            then()


class Cores:
    """Processor cores that several engines share: n busy engines on c cores take n / c times as long, if n > c."""

    def __init__(self, count: float) -> None:
        self._count = count
        self.engines: list[Engine] = []
        self._busy = 0

    def slowdown(self) -> float:
        """The factor for a step that begins now."""
        busy = sum(engine.working for engine in self.engines) + 1
        factor = max(1.0, busy / self._count)
        if busy != self._busy:
            self._busy = busy
            for engine in self.engines:
                engine.replan()
        return factor


class Instance:
    """One model replica with its prefix cache."""

    def __init__(
        self, events: Events, index: BlockIndex, spec: InstanceSpec, depot: Depot | None, cores: Cores | None
    ) -> None:
        self.spec, self.depot = spec, depot
        self.name, self.cluster = spec.name, spec.cluster
        self.profile = spec.profile
        self._events, self._cores = events, cores
        self.engines = [self._engine() for _ in range(spec.ranks)]
        self.cache = BlockCache(index, spec.profile.kv_capacity * spec.ranks)
        self.holders = self.cache.bit | (depot.cache.bit if depot else 0)
        self.down = ""
        self.assigned = 0  # requests that are placed on it to decode
        self.backlog = 0  # prompt tokens of those placed on it to prefill that they lack
        self._cost = spec.profile.prefill if isinstance(spec.profile.prefill, ForwardCost) else None

    def _engine(self) -> Engine:
        engine = Engine(self._events, self.profile, self._cores.slowdown if self._cores else None)
        if self._cores:
            self._cores.engines.append(engine)
        return engine

    def view(self) -> InstanceView:
        """As a policy sees it."""
        spec, engines = self.spec, self.engines
        running = waiting = 0
        usage = 0.0
        for engine in engines:
            running += engine.running
            waiting += engine.waiting
            usage += engine.kv_usage
        return InstanceView(
            spec.name, spec.cluster, spec.roles, not self.down, self.down, running, waiting, usage / len(engines),
            self._cost, spec.depot or spec.name, self.assigned, self.assigned,
            self.backlog,
        )  # fmt: skip

    def rank(self) -> Engine:
        """The least loaded rank."""
        if len(self.engines) == 1:
            return self.engines[0]
        return min(self.engines, key=lambda engine: engine.running + engine.waiting)

    def store(self, blocks: tuple[int, ...], block_tokens: int) -> None:
        """Its prefix cache, and its depot, have these blocks from now on."""
        if not blocks:
            return
        size = self.profile.kv_per_token
        self.cache.hold(sum(engine.used_tokens for engine in self.engines) * size)
        self.cache.store(blocks, block_tokens * size)
        if self.depot is not None:
            self.depot.cache.store(blocks, block_tokens * size)

    def fail(self) -> None:
        """Dies. Its depot, another process, lives on."""
        self.down = "it died"
        for engine in self.engines:
            engine.fail()
        self.cache.clear()
        if self._cores:
            self._cores.engines = [e for e in self._cores.engines if e.alive]

    def restore(self) -> None:
        """Is back, empty."""
        self.down = ""
        self.engines = [self._engine() for _ in range(self.spec.ranks)]

    def output_tokens(self) -> int:
        """Decode steps' tokens made so far by the engines that live."""
        return sum(engine.output_tokens() for engine in self.engines)
