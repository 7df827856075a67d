"""The Table 2 experiment at small scale: that the right work is done and told. Its timings are not tested."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from pdrelay.bench import fleet, pool, table2_plot, table2_text
from pdrelay.bench.line import Door, ShapedLine
from pdrelay.bench.settings import Place, Settings
from pdrelay.bench.table2 import Arm, Moments, Table2, arm_of, checks_of, load_of
from pdrelay.bench.table2_run import table2
from pdrelay.bench.table2_text import explain
from pdrelay.cluster.ports import free_addresses
from pdrelay.errors import BenchError


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Table2:
    home = tmp_path_factory.mktemp("table2")
    settings = Settings(carriers=("link-fair", "link-srpt"), line="user", scale=400.0, slower=1.5, duration=0.5, seed=3)
    return asyncio.run(table2(settings, Place(home, fleet.make_certificates(home)), lambda _: None))


def test_every_row_carries_the_same_transfers(result: Table2) -> None:
    assert result.failures == {}
    assert [(arm.carrier, arm.distribution) for arm in result.arms] == [
        ("link-fair", "skewed"), ("link-srpt", "skewed"), ("link-fair", "narrow"), ("link-srpt", "narrow"),
    ]  # fmt: skip
    load = load_of(400, 0.5, 3)
    for arm in result.arms:
        assert arm.transfers == 36  # of 40, the first tenth is left out
        assert arm.bytes == sum(load.sizes(arm.distribution)[4:])
        assert all(latency > 0 for latency in arm.latencies)
        assert arm.p50.value == pytest.approx(np.median(arm.latencies))
        assert 0 <= arm.queueing <= max(arm.latencies)
        assert 0 <= arm.connections_used <= 1
        assert 0 < arm.line_use <= 1.05
        assert arm.core_wait is not None
        assert 0 < arm.core_wait < 8
        assert arm.idle_p50 is not None
        assert arm.idle_p50 > 0
    assert result.mean_bytes["narrow"] == pytest.approx(0.1 * result.prompt_bytes, rel=0.05)
    assert result.rate == 20e9 / 8 / 400


def test_the_result_can_be_read(result: Table2) -> None:
    console = Console(file=io.StringIO(), record=True, width=160)
    table2_text.show(result, console)
    text = " ".join(console.export_text().split())
    assert text.count("published *") == 2
    assert "link-srpt" in text
    assert all(check.what in text for check in result.checks)
    assert "Ideal sharing" in text


def test_a_row_without_cores_is_no_measurement(result: Table2) -> None:
    for wait, told in ((0.8, True), (0.05, False)):
        arms = [msgspec.structs.replace(arm, core_wait=wait) for arm in result.arms[:1]]
        console = Console(file=io.StringIO(), record=True, width=160)
        table2_text.show(msgspec.structs.replace(result, arms=arms), console)
        assert ("NOT a measurement" in console.export_text()) == told


def test_latencies_can_be_drawn(result: Table2, tmp_path: Path) -> None:
    table2_plot.plot(result, tmp_path / "latency.svg")
    assert "</svg>" in (tmp_path / "latency.svg").read_text()
    with pytest.raises(BenchError, match="gone"):
        table2_plot.plot(result, tmp_path / "gone" / "latency.png")


def test_the_load_has_the_published_means_and_is_the_same_for_a_seed() -> None:
    load = load_of(100, 30, 0)
    assert load == load_of(100, 30, 0)
    assert load != load_of(100, 30, 1)
    assert len(load.arrivals) == 2400
    for name in ("skewed", "narrow"):
        offered = sum(load.sizes(name)) / 30 / (20e9 / 8 / 100)  # type: ignore[arg-type]
        assert offered == pytest.approx(0.9, abs=0.02)


def arm(carrier: str, distribution: str, factor: float) -> Arm:
    load = load_of(100, 2, 0)
    arrived = np.asarray(load.arrivals)
    sizes = np.asarray(load.sizes(distribution))  # type: ignore[arg-type]
    ended = arrived + 0.001 + factor * sizes / 25e6
    moments = Moments(arrived.tolist(), (arrived + 0.001).tolist(), ended.tolist())
    return arm_of(carrier, distribution, load, moments, 25e6, 4, 0.5)  # type: ignore[arg-type]


def test_checks_compare_rows_and_say_whether_they_hold() -> None:
    arms = [arm("link-fair", "skewed", 10), arm("link-srpt", "skewed", 2), arm("link-fair", "narrow", 10)]
    checks = {check.what: check for check in checks_of(arms)}
    assert set(checks) == {
        "P50, link-fair: skewed beside narrow", "P50, skewed: srpt beside fair", "P99, skewed: srpt beside fair",
    }  # fmt: skip
    assert all(check.holds for check in checks.values())
    p50 = checks["P50, skewed: srpt beside fair"]
    assert p50.ratio.low <= p50.ratio.value <= p50.ratio.high
    slow = [arm("link-fair", "skewed", 2), arm("link-srpt", "skewed", 2.5)]
    assert [check.holds for check in checks_of(slow)] == [False, False]


def test_explanations_are_of_the_rows_that_ran() -> None:
    load = load_of(100, 2, 0)
    assert explain([arm("link-fair", "skewed", 10)], load, 25e6, 100) == []
    both = [arm("pool", name, 187) for name in ("skewed", "narrow")]
    texts = explain(both, load, 25e6, 100)
    assert len(texts) == 2
    assert "169 busy connections, 66% of 256" in texts[1] or "168 busy connections, 66% of 256" in texts[1]


def test_moments_know_how_many_were_under_way() -> None:
    moments = Moments([0, 0, 0], [0.0, 1.0, 5.0], [2.0, 3.0, 6.0])
    assert moments.under_way(0, 4) == pytest.approx(1.0)
    assert moments.under_way(1, 2) == pytest.approx(2.0)


async def test_a_pool_gives_each_transfer_a_connection_in_order_of_arrival(tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    door = Door(address, address)
    line = ShapedLine("user", math.inf, 0.0, fleet.Route("", "", "", ""), door, door)
    sizes = [1_500_000] * 6
    async with pool.connected(line, 2, 7.5e6, tmp_path) as connections:
        moments = await connections.run([0.0] * 6, sizes)
        again = await connections.run([0.0, 0.01], sizes[:2])
    assert moments.began == sorted(moments.began)
    changes = sorted([(at, 1) for at in moments.began] + [(at, -1) for at in moments.ended])
    assert max(itertools.accumulate(change for _, change in changes)) == 2
    # 1.5 MB at 7.5 MB/s are 0.2 s; the kernel lets the first few large packets of the loopback go at once.
    assert all(ended - began > 0.1 for began, ended in zip(moments.began, moments.ended, strict=True))
    assert len(again.ended) == 2
