"""Lines between clusters from what depots measure host by host."""

from __future__ import annotations

import msgspec

from pdrelay.cluster.config import Deployment, Gateway, Model, Tls
from pdrelay.cluster.topology import Cluster, Host, Link
from pdrelay.depot.base import LinkEstimate, LinkState
from pdrelay.gateway.lines import Lines
from pdrelay.policy.base import LinkView

DEPLOYMENT = Deployment(
    model=Model(name="m", path="m"),
    gateway=Gateway(cluster="a"),
    tls=Tls(directory="tls"),
    fleet_key_file="key",
    cluster=[Cluster(name="a"), Cluster(name="b")],
    host=[Host(name=name, cluster=name[0], socket=name, listen="127.0.0.1:1") for name in ("a1", "a2", "b1")],
    instance=[],
    link=[Link(source="a", target="b", rate="80mbit", rtt="20ms")],
)
FOUND = LinkEstimate(to="b1", rate=5e6, measured=True, rtt=0.05, base_rtt=0.03, queued=700)


def view(lines: Lines) -> LinkView:
    return lines.views()["a", "b"]


def test_a_line_is_what_the_file_says_until_it_was_measured() -> None:
    lines = Lines(DEPLOYMENT)
    assert view(lines) == LinkView(10e6, 0.02)
    lines.estimate("a1", FOUND)
    assert view(lines) == LinkView(5e6, 0.03, "", 700)
    assert lines.rtt("b", "a") == 0.03
    lines.forget("a1")
    assert view(lines) == LinkView(10e6, 0.02)


def test_a_codec_lets_more_kv_through() -> None:
    lines = Lines(DEPLOYMENT)
    lines.estimate("a1", msgspec.structs.replace(FOUND, ratio=1.5))
    assert view(lines).rate == 7.5e6


def test_hosts_of_a_cluster_share_the_line() -> None:
    lines = Lines(DEPLOYMENT)
    lines.estimate("a1", FOUND)
    lines.estimate("a2", msgspec.structs.replace(FOUND, rate=6e6, queued=300))
    assert view(lines) == LinkView(6e6, 0.03, "", 1000)


def test_a_line_is_down_when_no_host_reaches_any() -> None:
    lines = Lines(DEPLOYMENT)
    lines.state("a1", LinkState("b1", False, "cut"))
    assert view(lines).down == ""
    lines.state("a2", LinkState("b1", False))
    assert view(lines).down == "cut"
    lines.state("a2", LinkState("b1", True))
    assert view(lines).down == ""
