"""Sending KV or computing it again at the far end: which is sooner."""

from __future__ import annotations

import math
from typing import NamedTuple

from pdrelay.perf.equations import prefill_seconds
from pdrelay.perf.profile import ForwardCost
from pdrelay.policy.base import LinkView


class Alternatives(NamedTuple):
    """Seconds until the far end has the KV of a prompt."""

    send: float  # over the line, once it exists here
    recompute: float  # by a prefill there

    @property
    def recompute_is_cheaper(self) -> bool:
        """Whether the line is not worth its time. At break-even KV is sent: it leaves the far end's compute alone."""
        return self.recompute < self.send


def weigh(missing: int, held: int, size: float, line: LinkView | None, far: ForwardCost) -> Alternatives:
    """What `missing` prompt tokens behind `held` ones cost: `size` bytes on `line` (None: there is none), or a prefill
    by an engine of cost `far` that holds the `held` ones."""
    send = math.inf if line is None or line.down else line.transfer_seconds(size)
    return Alternatives(send, prefill_seconds(far, missing, held))
