"""Plays requests on an endpoint: prompts made, caches warmed, the open load run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from pdrelay.bench.answers import Answer, ask
from pdrelay.bench.endpoint import Target
from pdrelay.bench.open_load import OpenLoad, Pace, Send, Sent
from pdrelay.bench.prompts import Prompts
from pdrelay.errors import BenchError
from pdrelay.workload.base import Request

WARMING = 2
"""Times that the common prefix of a workload with declared hit rates is sent before the clock starts."""
PROBE = Request(0.0, 32, 8)
"""Goes before the clock starts: it opens the way."""


class Play:
    """One playing of a workload; `ended` and `load` hold what was measured, also when it is cut short."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, seed: int, pace: Pace, extra: Mapping[str, Any],
        on_end: Callable[[int, int], None] = lambda _ended, _failed: None,
    ) -> None:  # fmt: skip
        """Prompts of unlike seeds have nothing in common. `on_end(ended, failed)` is called after each request."""
        self._session, self._target, self._extra, self._on_end = session, target, extra, on_end
        self._prompts = Prompts(len(target.alphabet), seed)
        self.ended: list[Sent] = []
        self._failed = 0
        self.load = OpenLoad(self._prepare, pace, self._take)

    async def run(self, requests: Sequence[Request]) -> None:
        """Plays all of it. Raises BenchError when the endpoint does not even answer what goes before."""
        await self._warm(requests)
        await self.load.run(requests)

    async def _warm(self, requests: Sequence[Request]) -> None:
        """Shows every cache the prefix that declared hit rates mean; otherwise a short request opens the way."""
        longest = max((turn.cached for request in requests for turn in request.turns()), default=-1)
        for number in range(WARMING if longest > 0 else 1):
            symbols = self._prompts.warm(longest) if longest > 0 else []
            symbols += self._prompts.symbols(-1 - number, PROBE)
            answer = Answer()
            await ask(self._session, self._target.path, self._target.body(symbols, PROBE.output), answer)
            if answer.error:
                raise BenchError(f"a request before the measurement failed: {answer.error}")

    def _prepare(self, number: int, request: Request) -> Send:
        body = self._target.body(self._prompts.symbols(number, request), request.output, self._extra)
        return lambda answer: ask(self._session, self._target.path, body, answer)

    def _take(self, sent: Sent) -> None:
        self.ended.append(sent)
        self._failed += bool(sent.answer.error)
        self._on_end(len(self.ended), self._failed)
