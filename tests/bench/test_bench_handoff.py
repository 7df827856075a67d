import json

import pytest
from click.testing import CliRunner

from pdrelay.bench.seam import AROUND, seams
from pdrelay.bench.streams import Stream
from pdrelay.cli.bench.handoff import command


def stream(gaps: list[float], seam: int) -> Stream:
    arrivals = [1.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return Stream(arrivals, [], {"handoff_index": seam, "handoff_rounds": 2, "relay_extra_tokens": 5, "held_back": 3})


def test_a_pause_at_the_seam_is_told_from_those_elsewhere():
    even = [0.02] * 100
    paused = [*even[:49], 0.2, *even[50:]]  # before token 50
    found = seams("one_shot", [stream(paused, 50), stream(even, 50)], round_trip=0.03)
    assert (found.handoffs, found.median_gap, found.pause_max) == pytest.approx((2, 0.02, 0.2))
    assert found.elsewhere_p95 == pytest.approx(0.02)
    assert (found.within_round_trip, found.within_elsewhere, found.within_both) == (0.5, 0.5, 0.5)
    assert (found.rounds_mean, found.relay_extra_tokens_mean, found.held_back_mean) == (2, 5, 3)


def test_a_pause_elsewhere_does_not_count_as_the_seams():
    gaps = [*[0.02] * 20, 0.5, *[0.02] * 79]
    found = seams("catch_up", [stream(gaps, 60)], round_trip=0.03)
    assert found.pause_max == pytest.approx(0.02)
    assert found.elsewhere_p95 > 0.02
    assert found.elsewhere_within_round_trip == 0.8  # four of five windows


def test_the_curve_shows_the_rate_on_both_sides():
    found = seams("catch_up", [stream([0.02] * 200, 100)], round_trip=0.03)
    assert all(rate == pytest.approx(50, rel=0.25) for rate in found.curve[5:-5])


def test_seams_at_the_ends_are_left_out():
    assert seams("catch_up", [stream([0.02] * 50, AROUND), stream([0.02] * 50, 50 - AROUND + 2)], 0.03) is None


def test_all_parts_run_on_emulated_engines(tmp_path):
    plot = tmp_path / "curve.svg"
    result = CliRunner().invoke(command, ["--emulated", "--quick", "--json", "--plot", str(plot)])
    report = json.loads(result.stdout)
    assert report["failures"] == {}
    assert {(cost["way"], cost["line"], cost["tokens"]) for cost in report["costs"]} == {
        (way, line, tokens) for way in ("recompute", "ship") for line in ("idle", "loaded") for tokens in (10, 100)
    }
    recompute = [cost for cost in report["costs"] if cost["way"] == "recompute"]
    assert all(cost["bytes"] < 1024 for cost in recompute), "ids are small whatever the model's KV"
    assert {seam["mode"] for seam in report["seams"]} == {"one_shot", "catch_up"}
    assert plot.stat().st_size > 1000


def test_a_bad_step_time_is_named():
    result = CliRunner().invoke(command, ["--step-time", "slow"])
    assert "--step-time" in str(result.exception)


def test_a_bad_line_is_refused():
    result = CliRunner().invoke(command, ["--emulated", "--quick", "--json", "--wan-rtt", "fast"])
    assert "--wan-rtt" in json.loads(result.stdout)["failures"]["deployment"]
