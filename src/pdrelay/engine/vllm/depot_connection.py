"""An engine process's connection to the depot of its host, made again in the background when it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdrelay.depot.base import EngineDepot
from pdrelay.errors import ContractError, DepotError

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class DepotConnection:
    """Never blocks its user for a depot that is gone. `get` and `lost` belong to one thread.

    Each connection has a `generation`: offsets of one generation mean nothing in the next.
    """

    def __init__(self, connect: Callable[[], EngineDepot]) -> None:
        """Tries once at once. Raises ContractError; a depot that is not there is only logged."""
        self._connect = connect
        self._depot: EngineDepot | None = None
        self._fresh: EngineDepot | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.generation = 0
        try:
            self._adopt(connect())
        except ContractError:
            raise
        except DepotError as error:
            _log.warning("depot is not there: %s; serving without it until it is", error)
            self._reconnect()

    def get(self) -> EngineDepot | None:
        """The connection, None while there is none."""
        if self._depot is None and self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            self._adopt(fresh)
            _log.info("connected to the depot")
        return self._depot

    def lost(self, error: Exception) -> None:
        """The connection failed; a new one is being made."""
        if self._depot is None:
            return
        _log.error("depot lost: %s; serving without it until it is back", error)
        self._depot.close()
        self._depot = None
        self._reconnect()

    def close(self) -> None:
        """Ends the connection and the attempts to make one."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for depot in (self._depot, self._fresh):
            if depot is not None:
                depot.close()
        self._depot = self._fresh = None

    def _adopt(self, depot: EngineDepot) -> None:
        self._depot = depot
        self.generation += 1

    def _reconnect(self) -> None:
        self._thread = threading.Thread(target=self._keep_trying, name="pdrelay-depot-link", daemon=True)
        self._thread.start()

    def _keep_trying(self) -> None:
        told = ""
        while not self._closed.wait(RETRY_SECONDS):
            try:
                self._fresh = self._connect()
            except (DepotError, ContractError) as error:
                told = self._tell_once(told, str(error))
            else:
                return

    @staticmethod
    def _tell_once(told: str, message: str) -> str:
        if message != told:
            _log.warning("depot cannot be reached: %s", message)
        return message
