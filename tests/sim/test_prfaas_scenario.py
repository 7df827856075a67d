"""PrfaaS's policy in the simulated world: who prefills, and a prefix that is fetched from the other cluster."""

from __future__ import annotations

import pytest
from worlds import TINY, WAN, run, settings, spec

from pdrelay.cluster.topology import Role
from pdrelay.policy.prfaas import Prfaas
from pdrelay.sim.scenario import Scenario
from pdrelay.workload.base import Request

FAST = WAN._replace(rate=1e9)


def scenario(policy: Prfaas) -> Scenario:
    instances = (
        spec("far", "a", Role.PREFILL, depot="a"), spec("near", "b", Role.PREFILL, depot="b"),
        spec("main", "b", Role.DECODE, depot="b"),
    )  # fmt: skip
    return Scenario(instances, {("a", "b"): FAST, ("b", "a"): FAST}, policy, settings())


def test_long_prompts_cross_the_line_and_short_ones_do_not() -> None:
    short, long = Request(0.0, 400, 5), Request(1.0, 4000, 5)
    _, records = run(scenario(Prfaas(1000)), short, long)
    assert [(r.prefill, r.pipeline) for r in records] == [("near", "p_d"), ("far", "p_md")]
    assert records[0].wan_bytes == 0
    assert records[1].wan_bytes == 4000 * TINY.kv_per_token


@pytest.mark.parametrize("bandwidth", ["scarce", "abundant"])
def test_a_prefix_that_the_other_cluster_holds_is_used_while_bandwidth_is_abundant(bandwidth: str) -> None:
    first = Request(0.0, 4096, 3, tuple(range(8)))
    again = Request(10.0, 4096 + 512, 3, (*range(8), 9))  # 512 new tokens; its prefix is at the far cluster
    policy = Prfaas(1000, bandwidth)  # type: ignore[arg-type]  # both are spelled in the parameters
    apart = scenario(policy)
    apart = apart._replace(instances=tuple(i._replace(depot=i.name) for i in apart.instances))
    _, records = run(apart, first, again)
    assert records[0].prefill == "far"
    if bandwidth == "scarce":
        assert (records[1].prefill, records[1].cached) == ("far", 4096)
    else:
        assert (records[1].prefill, records[1].cached) == ("near", 4096)
        assert records[1].wan_bytes == pytest.approx(4096 * TINY.kv_per_token)
