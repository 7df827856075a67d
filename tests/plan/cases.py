"""Small problems for tests of the planner."""

from __future__ import annotations

from typing import Any

from pdrelay.cluster.topology import Role
from pdrelay.perf.catalog import find_instance
from pdrelay.perf.lengths import lognormal
from pdrelay.plan.problem import Pool, Problem, Promise, Wire

H200 = find_instance("prfaas-1t-h200").profile()
H20 = find_instance("prfaas-1t-h20").profile()
PROMISE = Promise(tpot=0.025)
LENGTHS = lognormal(9.90, 1.00, 128, 131_072, 1024)


def case(promise: Promise = PROMISE, **more: Any) -> Problem:
    """PrfaaS's case study: 4 H200 instances and 8 H20 instances."""
    pools = (Pool("h200", "far", H200, 4, frozenset({Role.PREFILL, Role.RELAY})),
             Pool("h20", "near", H20, 8, frozenset({Role.PREFILL, Role.DECODE})))  # fmt: skip
    wires = {("far", "near"): Wire(100e9 / 8, rtt=0.01)}
    return Problem(**{"pools": pools, "wires": wires, "lengths": LENGTHS, "promise": promise, **more})
