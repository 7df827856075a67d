"""The emulated engine's KV memory: admission of sequences, and the prefix cache that fills what they leave free."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

OnHeld = Callable[[list[bytes], list[bytes]], None]


@dataclass(slots=True, eq=False)
class Claim:
    """What one admitted sequence holds: room for `pages`, and the cached pages that it uses."""

    pages: int
    used: dict[bytes, None] = field(default_factory=dict)


class _Waiter(NamedTuple):
    claim: Claim
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class _Page:
    drift: bytes
    users: int


class KvMemory:
    """Room for `capacity` pages and `max_seqs` sequences; first come, first admitted.

    A sequence claims the pages that it may need up to its end, so no admitted one ever waits for room. Pages that no
    sequence uses stay as prefix cache and go least recently used first. `on_held` is told which pages came and went.

    INV-EMU-1: claimed and idle pages together never exceed the capacity.
    """

    def __init__(self, capacity: int, max_seqs: int, on_held: OnHeld) -> None:
        self.capacity, self._max_seqs, self._on_held = capacity, max_seqs, on_held
        self._claims: set[Claim] = set()
        self._claimed = 0
        self._waiters: deque[_Waiter] = deque()
        self._pages: dict[bytes, _Page] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def running(self) -> int:
        """Admitted sequences."""
        return len(self._claims)

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiters)

    @property
    def usage(self) -> float:
        """Share of the memory that sequences claim, 0 to 1."""
        return self._claimed / self.capacity

    async def admit(self, pages: int) -> Claim:
        """Waits for room for a sequence of `pages`, which must not exceed the capacity."""
        assert pages <= self.capacity, "the caller rejects what can never fit"
        waiter = _Waiter(Claim(pages), asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._admit_waiters()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._admit_waiters()
            else:
                self.release(waiter.claim)
            raise
        return waiter.claim

    def use_cached(self, claim: Claim, names: Sequence[bytes]) -> list[bytes]:
        """Uses the leading `names` that are cached; their drifts."""
        drifts = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            self._use(claim, name, page)
            drifts.append(page.drift)
        return drifts

    def store(self, claim: Claim, name: bytes, drift: bytes) -> None:
        """A whole page of the claim is computed or loaded: others may use it from now on."""
        page = self._pages.get(name)
        if page is None:
            page = self._pages[name] = _Page(drift, 0)
            self._on_held([name], [])
        self._use(claim, name, page)

    def release(self, claim: Claim) -> None:
        """The sequence has ended. Its pages stay as cache where there is room."""
        self._claims.remove(claim)
        self._claimed -= claim.pages
        # Deepest first, so that eviction takes a prompt's end before its beginning.
        for name in reversed(claim.used):
            page = self._pages[name]
            page.users -= 1
            if not page.users:
                self._idle[name] = None
        self._admit_waiters()
        self._evict()

    def _use(self, claim: Claim, name: bytes, page: _Page) -> None:
        if name in claim.used:
            return
        page.users += 1
        self._idle.pop(name, None)
        claim.used[name] = None
        assert len(claim.used) <= claim.pages, "a sequence uses more pages than it claimed"

    def _admit_waiters(self) -> None:
        while self._waiters and self.running < self._max_seqs:
            claim, admitted = self._waiters[0]
            if self._claimed + claim.pages > self.capacity:
                break
            self._waiters.popleft()
            self._claims.add(claim)
            self._claimed += claim.pages
            admitted.set_result(None)
        self._evict()

    def _evict(self) -> None:
        removed = []
        while self._claimed + len(self._idle) > self.capacity:
            name, _ = self._idle.popitem(last=False)
            del self._pages[name]
            removed.append(name)
        if removed:
            self._on_held([], removed)
        assert self._claimed + len(self._idle) <= self.capacity, "INV-EMU-1"
