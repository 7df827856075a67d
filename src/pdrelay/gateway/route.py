"""Where one request runs."""

from __future__ import annotations

from typing import NamedTuple

from pdrelay.depot.base import DepotControl
from pdrelay.engine.base import Engine
from pdrelay.gateway.agreement import AgreementMonitor
from pdrelay.gateway.handoff import Handoffs
from pdrelay.policy.base import Placement


class Route(NamedTuple):
    """The parts of the deployment that one request uses."""

    placement: Placement
    prefill: Engine
    relay: Engine | None  # the placed relay, or the one that takes over when main decode or the line fails
    main: Engine
    depot: DepotControl  # of prefill's host
    main_depot: str | None  # None when main decode shares prefill's depot
    handoffs: Handoffs
    agreement: AgreementMonitor
    round_trip: float = 0.0  # seconds between gateway and main decode
    relay_depot: str | None = None  # None when the placed relay shares prefill's depot
