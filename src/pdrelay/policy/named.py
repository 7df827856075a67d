"""The policy that a configuration file asks for."""

from __future__ import annotations

from pdrelay.cluster.config import PolicySettings
from pdrelay.cluster.units import parse_time, quantity
from pdrelay.policy.base import PlacementPolicy
from pdrelay.policy.placement import CdcPd, IdcPd, NoState, Pdd
from pdrelay.policy.prfaas import Prfaas


def policy_of(settings: PolicySettings) -> PlacementPolicy[NoState]:
    """The gateway and the simulator both take it from here. Raises ConfigError."""
    budget = quantity("policy.wan_budget", settings.wan_budget, parse_time)
    match settings.name:
        case "pdd":
            return Pdd(settings.hit_threshold, wan_budget=budget, recompute=settings.recompute)
        case "cdc_pd":
            return CdcPd()
        case "idc_pd":
            return IdcPd()
        case "prfaas":
            return Prfaas(settings.threshold, settings.bandwidth)
        case "unified":
            return Prfaas(
                settings.threshold, settings.bandwidth, hit_threshold=settings.hit_threshold, wan_budget=budget
            )
