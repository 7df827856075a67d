"""What a policy sees and what it decides.

Policies are pure: no I/O, no clock, no randomness; `(state, snapshot, now) -> (state, decision)`. What a policy must
remember is in the state it returns, so the gateway and the simulator run the same objects.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

from pdrelay.cluster.topology import Role
from pdrelay.perf.equations import transfer_seconds
from pdrelay.perf.profile import ForwardCost


class Pipeline(enum.Enum):
    """The engines that a request passes."""

    P_MD = "p_md"  # prefill, then main decode in the other datacenter
    P_RLD_MD = "p_rld_md"  # prefill, relay decode beside it, then main decode
    P_D = "p_d"  # prefill and decode in one datacenter (the idc_pd baseline)


class InstanceView(NamedTuple):
    """An instance as a policy sees it."""

    name: str
    cluster: str
    roles: frozenset[Role]
    healthy: bool
    detail: str = ""  # why it is not healthy
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0 to 1
    prefill_cost: ForwardCost | None = None  # where a profile tells it
    host: str = ""  # whose depot it uses
    assigned: int = 0  # requests that are placed on it, also while their prompt is elsewhere
    counted: int = 0  # ... of those, how many `running` and `waiting` have in them
    backlog: int = 0  # prompt tokens that it is still to compute of those that are placed on it

    @property
    def load(self) -> int:
        """Requests that it has or will have: those placed within one prefill must not all see the same one idle."""
        return self.assigned + max(0, self.running + self.waiting - self.counted)


class LinkView(NamedTuple):
    """The line between two clusters, as it was last measured, or as it is configured until then."""

    rate: float  # bytes of KV per second
    rtt: float  # seconds
    down: str = ""  # why it carries nothing now; empty while it works
    queued: float = 0.0  # bytes that live transfers still have to send

    def transfer_seconds(self, size: float) -> float:
        """Time until `size` more bytes are across, behind what is queued."""
        return transfer_seconds(self.queued + size, self.rate, self.rtt)


class Snapshot(NamedTuple):
    """The deployment at one moment."""

    instances: tuple[InstanceView, ...]
    links: Mapping[tuple[str, str], LinkView]  # by (from, to) cluster

    def line_trouble(self, source: str, target: str) -> str:
        """Why nothing gets from cluster `source` to cluster `target` now; empty when it does."""
        link = self.links.get((source, target))
        return link.down if link else ""


class RequestView(NamedTuple):
    """A request as a policy sees it. `held` maps an instance to the prompt tokens that it or its depot holds."""

    prompt_tokens: int
    held: Mapping[str, int]
    forced: Pipeline | None = None  # debug control
    kv_bytes_per_token: float = 0.0

    def missing_bytes(self, instance: str) -> float:
        """Bytes of the prompt's KV that `instance` and its depot lack."""
        return (self.prompt_tokens - self.held.get(instance, 0)) * self.kv_bytes_per_token

    def hit_rate(self, instance: str) -> float:
        """Share of the prompt that `instance` or its depot holds."""
        return self.held.get(instance, 0) / self.prompt_tokens


class Placement(NamedTuple):
    """Where a request runs, and why."""

    pipeline: Pipeline
    prefill: str
    relay: str | None
    main: str
    hit_rate: float
    reason: str
    cache_from: str = ""  # an instance elsewhere that holds more of the prompt than `prefill`, where sending it pays


State = TypeVar("State")


class PlacementPolicy(Protocol[State]):
    """Places requests."""

    def initial(self) -> State:
        """The state before the first request."""
        ...

    def place(self, state: State, request: RequestView, snapshot: Snapshot, now: float) -> tuple[State, Placement]:
        """Places one request. Raises PlacementError naming what is down."""
        ...
