import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.cluster.topology import Role
from pdrelay.errors import PlacementError
from pdrelay.policy.base import InstanceView, LinkView, Pipeline, RequestView, Snapshot
from pdrelay.policy.placement import CdcPd, IdcPd, Pdd


def instance(name, cluster, *roles, healthy=True, **view):
    return InstanceView(name, cluster, frozenset(roles), healthy, detail="connection refused", **view)


P = instance("p-0", "dc-a", Role.PREFILL)
RLD = instance("rld-0", "dc-a", Role.RELAY)
MD = instance("md-0", "dc-b", Role.DECODE)


def request(held=0, forced=None):
    return RequestView(100, {"md-0": held}, forced)


def place(policy, request, *instances, down=""):
    links = {("dc-a", "dc-b"): LinkView(2.5e6, 0.03, down=down)}
    return policy.place(policy.initial(), request, Snapshot(instances, links), 0.0)[1]


@given(st.integers(0, 100))
def test_pdd_relays_below_the_threshold_only(held):
    placement = place(Pdd(0.95), request(held), P, RLD, MD)
    assert placement.pipeline is (Pipeline.P_MD if held >= 95 else Pipeline.P_RLD_MD)
    assert placement.relay == (None if held >= 95 else "rld-0")
    assert placement.hit_rate == held / 100


def test_forcing_overrides_the_hit_rate():
    assert place(Pdd(), request(100, Pipeline.P_RLD_MD), P, RLD, MD).relay == "rld-0"
    assert place(Pdd(), request(0, Pipeline.P_MD), P, RLD, MD).relay is None


@pytest.mark.parametrize(
    "relay", [RLD._replace(healthy=False), RLD._replace(kv_usage=0.95), RLD._replace(cluster="dc-c")]
)
def test_without_a_relay_with_room_requests_go_to_main_decode_alone(relay):
    placement = place(Pdd(), request(), P, relay, MD)
    assert placement.pipeline is Pipeline.P_MD
    assert "but" in placement.reason


def test_a_forced_relay_that_is_down_is_an_error():
    with pytest.raises(PlacementError, match=r"no healthy relay instance in dc-a: rld-0 \(dc-a\) is down"):
        place(Pdd(), request(forced=Pipeline.P_RLD_MD), P, RLD._replace(healthy=False), MD)


DOWN = MD._replace(healthy=False)


def test_while_main_decode_is_down_the_relay_serves():
    second = DOWN._replace(name="md-1", assigned=3)
    placement = place(Pdd(0.95), request(held=100), P, RLD, second, DOWN)
    assert (placement.pipeline, placement.relay, placement.main) == (Pipeline.P_RLD_MD, "rld-0", "md-0")
    assert "md-0 (dc-b) is down: connection refused" in placement.reason
    assert place(Pdd(0.95), request(held=0), P, RLD, DOWN, second._replace(healthy=True)).main == "md-1"


@pytest.mark.parametrize(
    ("policy", "relay", "forced"),
    [
        (CdcPd(), RLD, None),
        (Pdd(), RLD, Pipeline.P_MD),
        (Pdd(), RLD._replace(healthy=False), None),
        (Pdd(), RLD._replace(kv_usage=0.95), None),
    ],
)
def test_without_main_decode_and_a_relay_nothing_is_placed_and_the_error_says_why(policy, relay, forced):
    with pytest.raises(PlacementError, match=r"no healthy decode instance: md-0 \(dc-b\) is down: connection refused"):
        place(policy, request(forced=forced), P, relay, DOWN)


def test_a_deployment_without_main_decode_is_told():
    with pytest.raises(PlacementError, match="no healthy decode instance: none is configured"):
        place(Pdd(), request(), P, RLD)


def test_baselines():
    assert place(CdcPd(), request(), P, RLD, MD).pipeline is Pipeline.P_MD
    near = RLD._replace(roles=frozenset({Role.RELAY, Role.DECODE}))
    placement = place(IdcPd(), request(), P, near, MD)
    assert (placement.pipeline, placement.main, placement.relay) == (Pipeline.P_D, "rld-0", None)
    with pytest.raises(PlacementError, match="in dc-a: none is configured"):
        place(IdcPd(), request(), P, MD)


def test_the_instance_that_holds_most_wins_then_the_least_loaded():
    second = instance("md-1", "dc-b", Role.DECODE, running=1)
    assert place(Pdd(), request(held=50), P, RLD, MD._replace(running=9), second).main == "md-0"
    assert place(Pdd(), request(held=0), P, RLD, MD._replace(running=9), second).main == "md-1"


def test_of_instances_with_as_many_requests_the_one_with_less_to_compute_wins():
    busy, idle = P._replace(running=1, backlog=900), P._replace(name="p-1", running=1, backlog=100)
    assert place(Pdd(), request(), busy, idle, RLD, MD).prefill == "p-1"
    assert place(Pdd(), request(), busy, idle._replace(running=2), RLD, MD).prefill == "p-0"


def test_a_dead_line_sends_everything_to_the_relay_or_refuses():
    assert place(Pdd(), request(100), P, RLD, MD, down="no route").pipeline is Pipeline.P_RLD_MD
    for policy in (Pdd(), CdcPd()):
        with pytest.raises(PlacementError, match="the line from dc-a to dc-b is down: no route"):
            place(policy, request(100), P, MD, down="no route")


def test_requests_placed_before_the_first_arrives_spread_out():
    busy = instance("md-1", "dc-b", Role.DECODE, running=2)
    assert place(Pdd(), request(), P, RLD, MD._replace(assigned=1), busy).main == "md-0"
    assert place(Pdd(), request(), P, RLD, MD._replace(assigned=3), busy).main == "md-1"
