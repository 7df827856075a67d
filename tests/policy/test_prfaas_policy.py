"""PrfaaS's placement: by uncached length, with whose caches count, and when a side or a line is down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.cluster.topology import Role
from pdrelay.errors import PlacementError
from pdrelay.policy.base import InstanceView, LinkView, Pipeline, RequestView, Snapshot
from pdrelay.policy.prfaas import Prfaas


def instance(name, cluster, *roles, healthy=True, **view):
    return InstanceView(name, cluster, frozenset(roles), healthy, detail="connection refused", **view)


FAR = instance("far-0", "far", Role.PREFILL)
OTHER = instance("other-0", "other", Role.PREFILL)
RELAY = instance("rld-0", "far", Role.RELAY)
NEAR = instance("near-0", "home", Role.PREFILL)
MAIN = instance("md-0", "home", Role.DECODE)
ALL = (FAR, NEAR, MAIN)


def place(policy, request, *instances, down="", queued=0.0, back=True):
    links = {("far", "home"): LinkView(1e9, 0.03, down=down, queued=queued), ("other", "home"): LinkView(1e9, 0.03)}
    if back:
        links["home", "far"] = LinkView(1e9, 0.03)
    return policy.place(policy.initial(), request, Snapshot(instances, links), 0.0)[1]


@given(st.integers(1, 3000), st.integers(0, 2999))
def test_scarce_bandwidth_reckons_with_the_home_cluster_alone(prompt, near_held):
    near_held = min(near_held, prompt - 1)
    request = RequestView(prompt, {"near-0": near_held, "far-0": prompt - 1})
    placement = place(Prfaas(1000), request, *ALL)
    remote = prompt - near_held > 1000
    assert placement.prefill == ("far-0" if remote else "near-0")
    assert placement.pipeline is (Pipeline.P_MD if remote else Pipeline.P_D)
    assert placement.cache_from == ""


@given(st.integers(1, 3000), st.integers(0, 2999), st.integers(0, 2999))
def test_abundant_bandwidth_reckons_with_the_best_cache(prompt, near_held, far_held):
    held = {"near-0": min(near_held, prompt - 1), "far-0": min(far_held, prompt - 1)}
    placement = place(Prfaas(1000, "abundant"), RequestView(prompt, held), *ALL)
    remote = prompt - max(held.values()) > 1000
    assert placement.prefill == ("far-0" if remote else "near-0")
    best = max(held.values())
    elsewhere = "near-0" if remote else "far-0"
    assert placement.cache_from == (elsewhere if best > held[placement.prefill] else "")


def test_a_cache_is_not_fetched_where_no_line_leads():
    request = RequestView(3000, {"near-0": 1500, "far-0": 0})
    assert place(Prfaas(1000, "abundant"), request, *ALL).cache_from == "near-0"
    assert place(Prfaas(1000, "abundant"), request, *ALL, back=False).cache_from == ""


@pytest.mark.parametrize(
    ("tokens", "instances", "down", "prefill"),
    [
        (5000, (FAR._replace(healthy=False), NEAR, MAIN), "", "near-0"),
        (5000, ALL, "no connection", "near-0"),
        (10, (FAR, NEAR._replace(healthy=False), MAIN), "", "far-0"),
        (10, (FAR, MAIN), "", "far-0"),
    ],
)
def test_one_side_serves_for_the_other_when_it_is_down(tokens, instances, down, prefill):
    placement = place(Prfaas(1000), RequestView(tokens, {}), *instances, down=down)
    assert placement.prefill == prefill
    assert "but nobody prefills" in placement.reason


def test_when_nobody_can_prefill_the_error_names_everybody():
    down = [i._replace(healthy=False) for i in (FAR, NEAR)]
    with pytest.raises(PlacementError, match=r"far-0 \(far\) is down.*near-0 \(home\) is down"):
        place(Prfaas(1000), RequestView(5000, {}), *down, MAIN)


def test_a_cluster_whose_line_is_behind_is_left_out():
    request = RequestView(5000, {"far-0": 100})  # it would win by what it holds
    assert place(Prfaas(1000), request, *ALL, OTHER).prefill == "far-0"
    assert place(Prfaas(1000), request, *ALL, OTHER, queued=5e9).prefill == "other-0"
    assert place(Prfaas(1000), request, *ALL, queued=5e9).prefill == "far-0"


def test_the_best_cache_does_not_draw_everything_while_another_cluster_is_idle():
    request = RequestView(5000, {"far-0": 4000 - 100, "other-0": 100})
    assert place(Prfaas(1000), request, FAR._replace(running=1), NEAR, MAIN, OTHER).prefill == "far-0"
    assert place(Prfaas(1000), request, FAR._replace(running=2), NEAR, MAIN, OTHER).prefill == "other-0"


def test_a_relay_masks_the_line_where_the_policy_is_unified():
    request = RequestView(5000, {"md-0": 0})
    placement = place(Prfaas(1000, hit_threshold=0.95), request, *ALL, RELAY)
    assert (placement.pipeline, placement.relay) == (Pipeline.P_RLD_MD, "rld-0")
    assert "uncached tokens are more than 1000" in placement.reason
    assert place(Prfaas(1000), request, *ALL, RELAY).pipeline is Pipeline.P_MD
    assert place(Prfaas(1000, hit_threshold=0.95), RequestView(900, {}), *ALL, RELAY).pipeline is Pipeline.P_D


@pytest.mark.parametrize(("pipeline", "prefill"), [(Pipeline.P_MD, "far-0"), (Pipeline.P_D, "near-0")])
def test_forcing_overrides_the_threshold(pipeline, prefill):
    for tokens in (10, 5000):
        assert place(Prfaas(1000), RequestView(tokens, {}, pipeline), *ALL).prefill == prefill
