"""The transfers of one request's pages from prefill's depot: to main decode's, and to a relay's on another host."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from pdrelay.depot.base import Transfer, TransferStats
from pdrelay.errors import DepotUnavailableError, EngineUnavailableError
from pdrelay.gateway.route import Route
from pdrelay.kv.demand import Demand


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
                xfer=f"{request_id}/relay",
                names=list(pages.names),
                tails=pages.tails,
                to=route.relay_depot,
                addressee=placement.relay or "",
            )
        )
        self._stats = TransferStats()
        self.open = False

    def start(self) -> Coroutine[Any, Any, None]:
        """Opens it, from the call on; what is returned raises EngineUnavailableError when the depot does not hear."""
        self.open = True  # at once: a cancelled call may have reached the depot
        return self._tell()

    async def _tell(self) -> None:
        try:
            await self._depot.transfer(self._transfer)
            if self._to_relay is not None:
                await self._depot.transfer(self._to_relay)
        except DepotUnavailableError as error:
            raise EngineUnavailableError(f"the depot beside {self._beside} is down: {error}") from error

    async def stats(self) -> TransferStats:
        """What was sent so far; what was known last when the depot is gone."""
        if self.open:
            with suppress(DepotUnavailableError):
                self._stats = await self._depot.transfer_stats(self._transfer.xfer)
        return self._stats

    async def end(self, *, keep_sending: bool) -> None:
        """Ends it. With `keep_sending` what is under way still arrives, at low priority. Idempotent."""
        if not self.open:
            return
        self.open = False
        try:
            if self._to_relay is not None:
                with suppress(DepotUnavailableError):
                    await self._depot.end(self._to_relay.xfer)
        finally:  # a cancelled request still ends the other one
            await self._end_main(keep_sending=keep_sending)

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
