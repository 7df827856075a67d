"""The scenario of a deployment that runs, from its file and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.units import parse_size, parse_time
from pdrelay.perf.instance import InstanceProfile
from pdrelay.policy.named import policy_of
from pdrelay.sim.build import handoff_of
from pdrelay.sim.line import LineSpec
from pdrelay.sim.scenario import InstanceSpec, Scenario

MACHINE = "machine"


class Terms(NamedTuple):
    """What no profile of a single engine tells.

    `cores`: engines that step at once slow each other down as if they shared so many processor cores; 0 when each has
    its own. `front`: seconds of the gateway's before prefill has a request.
    """

    cores: float = 0.0
    front: float = 0.0


def deployed(
    deployment: Deployment,
    profiles: Mapping[str, InstanceProfile],
    rates: Mapping[tuple[str, str], float],
    terms: Terms,
    seed: int = 0,
) -> Scenario:
    """The deployment as the simulator sees it.

    `profiles` by instance; `rates` in bytes/s by (source, target) cluster, where they were measured.
    Raises ConfigError.
    """
    instances = tuple(
        InstanceSpec(
            instance.name, instance.cluster, frozenset(instance.roles), profiles[instance.name], depot=instance.host,
            cores=MACHINE if terms.cores else "",
        )
        for instance in deployment.instance
    )  # fmt: skip
    lines = {
        (link.source, link.target): LineSpec(
            rates.get((link.source, link.target), link.first_rate), parse_time(link.rtt), discipline=link.schedule
        )
        for link in deployment.link
    }
    return Scenario(
        instances=instances,
        lines=lines,
        policy=policy_of(deployment.policy),
        handoff=handoff_of(deployment.policy),
        depots={host.name: float(parse_size(host.arena)) for host in deployment.host},
        cores={MACHINE: terms.cores} if terms.cores else {},
        front=terms.front,
        seed=seed,
    )
