"""Pages go to main decode's depot, and to the relay's when that is another host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdrelay.depot.base import TransferStats
from pdrelay.gateway.route import Route
from pdrelay.gateway.transfer import PageTransfer
from pdrelay.kv.demand import Demand
from pdrelay.policy.base import Pipeline, Placement


class Depot:
    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.seen: list[tuple[str, str | None, str]] = []

    async def transfer(self, transfer: Any) -> None:
        self.live[transfer.xfer] = transfer
        self.seen.append((transfer.xfer, transfer.to, transfer.addressee))

    async def end(self, xfer: str) -> TransferStats:
        del self.live[xfer]
        return TransferStats()

    async def demote(self, xfer: str) -> None:
        del self.live[xfer]

    async def transfer_stats(self, xfer: str) -> TransferStats:
        return TransferStats()


@pytest.mark.parametrize("keep_sending", [False, True])
@pytest.mark.parametrize("relay_depot", [None, "host-r"])
async def test_every_transfer_is_opened_and_ended_once(relay_depot: str | None, keep_sending: bool) -> None:
    depot = Depot()
    placement = Placement(Pipeline.P_RLD_MD, "p", "r", "m", 0.0, "")
    engine = SimpleNamespace()
    route = Route(placement, engine, engine, engine, depot, "host-m", None, None, relay_depot=relay_depot)  # type: ignore[arg-type]
    transfer = PageTransfer(route, Demand((b"a", b"b"), 1), "x")
    await transfer.start()
    assert depot.seen == [("x", "host-m", "m"), *([("x/relay", "host-r", "r")] if relay_depot else [])]
    await transfer.end(keep_sending=keep_sending)
    await transfer.end(keep_sending=keep_sending)
    assert not depot.live
