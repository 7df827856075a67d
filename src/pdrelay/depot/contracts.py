"""Which KV contract holds for each model, and who vouches for it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pdrelay.depot.index import Index
from pdrelay.kv.contract import KVContract, Layout

ModelScope = tuple[str, str]


def scope_of(contract: KVContract) -> ModelScope:
    """Model and revision: two contracts of one scope must be equal."""
    return contract.model, contract.revision


class Contracts:
    """All engines and peers of a depot agree on one contract a model, for as long as any of them is here."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.on_void: Callable[[Collection[Layout]], None] = lambda _: None  # told of layouts that nobody uses any more
        self._contracts: dict[ModelScope, KVContract] = {}
        self._holders: dict[ModelScope, set[str]] = {}

    def join(self, holder: str, contract: KVContract) -> None:
        """`holder` keeps its copies by `contract`. Raises ContractError when another holder has a different one."""
        scope = scope_of(contract)
        known = self._contracts.get(scope)
        if known is not None and known != contract:
            if self._holders[scope] - {holder} or self._index.in_use(known.layouts):
                known.require_equal(contract)
            self._index.evict_all(known.layouts)
            self.on_void(known.layouts)
        self._contracts[scope] = contract
        self._holders.setdefault(scope, set()).add(holder)

    def leave(self, holder: str) -> None:
        """`holder` is gone."""
        for holders in self._holders.values():
            holders.discard(holder)

    def declared(self, prefix: str) -> list[KVContract]:
        """The contracts of holders whose name starts with `prefix`."""
        return [
            contract
            for scope, contract in self._contracts.items()
            if any(holder.startswith(prefix) for holder in self._holders[scope])
        ]

    def of(self, prefix: str) -> KVContract | None:
        """The contract of the holders whose name starts with `prefix`, when it is exactly one."""
        declared = self.declared(prefix)
        return declared[0] if len(declared) == 1 else None

    def only(self) -> KVContract | None:
        """The contract, when there is exactly one in force."""
        held = [contract for scope, contract in self._contracts.items() if self._holders[scope]]
        return held[0] if len(held) == 1 else None
