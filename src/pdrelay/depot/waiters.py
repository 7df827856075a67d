"""Who waits for which pages, and what engines hold in their own caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdrelay.depot.index import Index


class HeldPages:
    """Pages in the engines' own KV caches, as the engines report them; by connection, since engines restart."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, set[bytes]]] = {}

    def report(self, instance: str, connection: int, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """What entered and left the cache of `instance`."""
        names = self._held.setdefault(instance, {}).setdefault(connection, set())
        names.difference_update(removed)
        names.update(added)

    def forget(self, instance: str, connection: int) -> set[bytes]:
        """The connection closed; the names that it had reported."""
        connections = self._held.get(instance, {})
        gone = connections.pop(connection, set())
        if not connections:
            self._held.pop(instance, None)
        return gone

    def holds(self, instance: str, name: bytes) -> bool:
        """Whether the cache of `instance` holds page `name`."""
        return any(name in names for names in self._held.get(instance, {}).values())

    def names_of(self, instance: str) -> list[bytes]:
        """All that the cache of `instance` holds."""
        return list(set().union(*self._held.get(instance, {}).values()))

    def instances(self) -> list[str]:
        """Engines that have reported."""
        return list(self._held)


@dataclass(slots=True, eq=False)
class Waiter:
    """One wait for names."""

    names: Sequence[bytes]
    engine: str
    done: Callable[[], None]
    missing: set[bytes]


class Waiters:
    """Calls each waiter back once, when all its names are there at the same time."""

    def __init__(
        self, index: Index, held: HeldPages, recall: Callable[[Iterable[bytes]], None] = lambda _: None
    ) -> None:
        """`recall` brings pages back that are on disk only."""
        self._index, self._held, self._recall = index, held, recall
        self._by_name: dict[bytes, set[Waiter]] = {}

    def __len__(self) -> int:
        return len(set().union(*self._by_name.values())) if self._by_name else 0

    def add(self, names: Sequence[bytes], engine: str, done: Callable[[], None]) -> Waiter:
        """Waits until each name is in the arena or in the cache of `engine`; `done` may be called at once."""
        waiter = Waiter(names, engine, done, set())
        self._await_missing(waiter)
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """Stops waiting."""
        for name in waiter.missing:
            self._drop(name, waiter)
        waiter.missing.clear()

    def arrived(self, names: Iterable[bytes], engine: str | None = None) -> None:
        """`names` became complete in the arena, or in the cache of `engine`."""
        for name in names:
            for waiter in list(self._by_name.get(name, ())):
                if engine is None or waiter.engine == engine:
                    waiter.missing.discard(name)
                    self._drop(name, waiter)
                    if not waiter.missing:
                        self._await_missing(waiter)

    def _await_missing(self, waiter: Waiter) -> None:
        # Looks at all names anew: one that was there before may have been evicted since.
        waiter.missing = {name for name in waiter.names if not self._available(name, waiter.engine)}
        for name in waiter.missing:
            self._by_name.setdefault(name, set()).add(waiter)
        if waiter.missing:
            self._recall(waiter.missing)
        else:
            waiter.done()

    def _available(self, name: bytes, engine: str) -> bool:
        return self._index.complete(name) or (bool(engine) and self._held.holds(engine, name))

    def _drop(self, name: bytes, waiter: Waiter) -> None:
        waiters = self._by_name[name]
        waiters.discard(waiter)
        if not waiters:
            del self._by_name[name]
