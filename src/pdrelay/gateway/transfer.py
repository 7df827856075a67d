"""The transfers of one request's pages from prefill's depot: to main decode's, and to a relay's on another host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pdrelay.depot.base import Transfer, TransferStats
from pdrelay.errors import DepotUnavailableError, PdrelayError
from pdrelay.gateway.route import Route
from pdrelay.kv.demand import Demand

TO_RELAY = "/relay"
"""What the id of a transfer to a relay's depot has behind the request's."""

MISSING_SECONDS = 1.0
"""A transfer that is still open so long after prefill is told that no more pages come: absent ones are lost."""


def request_of(xfer: str) -> str:
    """The id of the request that the transfer belongs to."""
    return xfer.removesuffix(TO_RELAY)


class PageTransfer:
    """Opened once, ended once (INV-LEASE-1)."""

    def __init__(self, route: Route, pages: Demand, request_id: str) -> None:
        placement = route.placement
        self._depot, self._beside = route.depot, placement.prefill
        self._transfer = Transfer(
            xfer=request_id,
            names=list(pages.names),
            tails=pages.tails,
            to=route.main_depot,
            addressee=placement.main,
        )
        self._to_relay = (
            None
            if route.relay_depot is None
            else Transfer(
                xfer=request_id + TO_RELAY,
                names=list(pages.names),
                tails=pages.tails,
                to=route.relay_depot,
                addressee=placement.relay or "",
            )
        )
        self._all = [self._transfer, *([] if self._to_relay is None else [self._to_relay])]
        self._stats = TransferStats()
        self.open = False
        self._told: asyncio.Task[None] | None = None
        self._missing: asyncio.TimerHandle | None = None
        self._end: asyncio.Task[None] | None = None

    def start(self, failed: Callable[[str], None]) -> None:
        """Opens it. Nobody waits for the depot's word; `failed` is told why there is none."""
        self.open = True  # at once: a call that fails may have reached the depot
        self._told = asyncio.create_task(self._tell(failed))

    def prefill_runs(self) -> None:
        """Pages are being produced, again; or none are missed any more."""
        if self._missing is not None:
            self._missing.cancel()

    def prefill_ended(self) -> None:
        """No more pages are produced."""
        if self.open:
            self._missing = asyncio.get_running_loop().call_later(MISSING_SECONDS, self._say_produced)

    def _say_produced(self) -> None:
        assert self._told is not None
        self._told = asyncio.create_task(self._tell_produced(self._told))

    async def _tell_produced(self, told: asyncio.Task[None]) -> None:
        await told
        with suppress(PdrelayError):  # why is known by now, or will be
            for transfer in self._all:
                await self._depot.transfer(msgspec.structs.replace(transfer, produced=True))

    async def _tell(self, failed: Callable[[str], None]) -> None:
        try:
            for transfer in self._all:
                await self._depot.transfer(transfer)
        except DepotUnavailableError as error:
            failed(f"the depot beside {self._beside} is down: {error}")
        except PdrelayError as error:
            failed(f"the depot beside {self._beside} refused the transfer: {error}")

    async def stats(self) -> TransferStats:
        """What was sent so far; what was known last when the depot is gone."""
        if self.open:
            with suppress(DepotUnavailableError):
                self._stats = await self._depot.transfer_stats(self._transfer.xfer)
        else:
            await self.ended()
        return self._stats

    def end(self, *, keep_sending: bool) -> None:
        """Ends it. With `keep_sending` what is under way still arrives, at low priority. Idempotent."""
        if self.open:
            self.open = False
            self.prefill_runs()
            self._end = asyncio.create_task(self._tell_end(keep_sending=keep_sending))

    async def ended(self) -> None:
        """Waits until the depot knows, if it was ended. Who is cancelled meanwhile leaves that to go on."""
        if self._end is not None:
            await asyncio.shield(self._end)

    async def _tell_end(self, *, keep_sending: bool) -> None:
        assert self._told is not None
        try:
            await self._told  # a depot must hear of the end last
        finally:  # a cancelled task, which cancels what it awaits, still ends both
            try:
                await self._end_relay()
            finally:
                await self._end_main(keep_sending=keep_sending)

    async def _end_relay(self) -> None:
        if self._to_relay is not None:
            with suppress(DepotUnavailableError):
                await self._depot.end(self._to_relay.xfer)

    async def _end_main(self, *, keep_sending: bool) -> None:
        xfer = self._transfer.xfer
        if keep_sending and self._transfer.to is not None:
            try:
                with suppress(DepotUnavailableError):
                    self._stats = await self._depot.transfer_stats(xfer)
            finally:  # also when cancelled: nobody comes back to this transfer
                with suppress(DepotUnavailableError):
                    await self._depot.demote(xfer)
            return
        with suppress(DepotUnavailableError):  # then it ends with the connection, or when that is back
            self._stats = await self._depot.end(xfer)
