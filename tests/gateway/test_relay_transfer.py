"""Pages go to main decode's depot, and to the relay's when that is another host's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdrelay.depot.base import TransferStats
from pdrelay.errors import DepotUnavailableError, ProtocolError
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
    transfer = _transfer(depot, relay_depot)
    transfer.start(failed=pytest.fail)
    transfer.end(keep_sending=keep_sending)  # at once; a depot that heard of the end first would keep it for ever
    await transfer.ended()
    assert depot.seen == [("x", "host-m", "m"), *([("x/relay", "host-r", "r")] if relay_depot else [])]
    transfer.end(keep_sending=keep_sending)
    await transfer.ended()
    assert not depot.live


@pytest.mark.parametrize(
    ("error", "what"),
    [(DepotUnavailableError("no answer"), "is down: no answer"), (ProtocolError("no"), "refused the transfer: no")],
)
async def test_a_depot_that_does_not_take_a_transfer_is_told_of(error: Exception, what: str) -> None:
    class Deaf(Depot):
        async def transfer(self, transfer: Any) -> None:
            raise error

        async def end(self, xfer: str) -> TransferStats:
            raise DepotUnavailableError("no answer")

    told: list[str] = []
    transfer = _transfer(Deaf(), None)
    transfer.start(told.append)
    transfer.end(keep_sending=False)
    await transfer.ended()
    assert told == [f"the depot beside p {what}"]


async def test_who_is_cancelled_while_a_depot_is_slow_leaves_its_end_to_be_told() -> None:
    class Slow(Depot):
        answer = asyncio.Event()

        async def transfer(self, transfer: Any) -> None:
            await super().transfer(transfer)
            await self.answer.wait()

    depot = Slow()
    transfer = _transfer(depot, "host-r")
    transfer.start(failed=pytest.fail)
    transfer.end(keep_sending=False)
    waiting = asyncio.create_task(transfer.ended())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(depot.live) == ["x"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    depot.answer.set()
    await transfer.ended()
    assert len(depot.seen) == 2
    assert not depot.live


def _transfer(depot: Depot, relay_depot: str | None) -> PageTransfer:
    placement = Placement(Pipeline.P_RLD_MD, "p", "r", "m", 0.0, "")
    engine = SimpleNamespace()
    route = Route(placement, engine, engine, engine, depot, "host-m", None, None, relay_depot=relay_depot)  # type: ignore[arg-type]
    return PageTransfer(route, Demand((b"a", b"b"), 1), "x")
