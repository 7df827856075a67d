"""What `pdrelay bench compare` makes of its requests, and what it keeps when a part fails."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdrelay.bench.compare import run as bench
from pdrelay.bench.compare import site, stock, text
from pdrelay.bench.compare.experiment import BASELINE, OURS, Experiment, write_profiles
from pdrelay.bench.compare.player import Played
from pdrelay.bench.compare.rows import Row, figures, played
from pdrelay.bench.compare.simulate import simulate
from pdrelay.errors import BenchError
from pdrelay.perf.profile import load, shipped

REQUIRED = {
    "completed", "failed", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p50_ttst_ms", "p90_ttst_ms", "p99_ttst_ms",
    "p90_tpot_ms", "max_gap_ms", "relay_share", "wan_bytes", "line_use",
}  # fmt: skip


def row(number: int, ttst: float = 2.0, **changes: Any) -> Row:
    plain = Row(
        number=number, due=float(number), ttft=1.0, ttst=ttst, tpot=0.1, e2el=4.0, largest_gap=0.2, transfer=1.0,
        hit_rate=0.9, tokens=(1, 2, 7), wan_bytes=100.0, handoff=2.5, error="", moments=[1.0, ttst, 2.2, 4.0],
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def test_a_played_request_is_told_in_the_evaluations_seconds():
    trace = {
        "prefill_done": 0.1, "kv_ready": 0.4, "prefill_tokens": 1, "relay_tokens": 2, "main_tokens": 1, "hit_rate": 0.5,
        "wan_bytes": 9, "handoff_done": 0.5,
    }  # fmt: skip
    moments, tokens = [0.1, 0.2, 0.5], [1, 3, 4]
    found = played(Played(number=3, due=1.0, lag=0.0, output=4, moments=moments, tokens=tokens, trace=trace, error=""),
                   speed=10.0)  # fmt: skip
    assert (found.due, found.ttft, found.ttst, found.e2el) == pytest.approx((10.0, 1.0, 2.0, 5.0))
    assert (found.transfer, found.largest_gap, found.tpot) == pytest.approx((3.0, 3.0, 4 / 3))
    assert found.tokens == (1, 2, 1)


def test_all_tokens_of_a_peer_are_decodes():
    found = played(Played(number=0, due=1.0, lag=0.0, output=4, moments=[0.1, 0.2], tokens=[2, 4],
                          trace={"token_ids": None}, error=""), speed=1.0)  # fmt: skip
    assert (found.tokens, found.ttst, found.wan_bytes) == ((0, 0, 4), 0.1, 0)
    assert math.isnan(found.transfer)
    assert math.isnan(found.hit_rate)


def test_a_peer_that_is_not_installed_is_told_with_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "stock_pd.py"
    script.write_text('import sys; print(\'{"missing": "python it --install"}\'); sys.exit(3)')

    async def start() -> None:
        async with stock.running(stock.Peer(script, tmp_path), "m", 1e6, 0.0, tmp_path):
            pass

    with pytest.raises(BenchError, match=r"network namespaces need|not installed: python it --install"):
        asyncio.run(start())
    command = [sys.executable, "-m", "pdrelay.cli.main", "bench", "compare", "--peer", "stock_pd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "--peer needs --real" in done.stderr) == (2, True)


def test_figures_have_the_promised_keys_and_count_failed_requests_apart():
    rows = [row(0), row(1, ttst=4.0), row(2, error="HTTP 503", ttst=math.nan, tokens=(0, 0, 0))]
    found = figures(rows, line_rate=50.0)
    assert found.keys() >= REQUIRED
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["p50_ttst_ms"] == pytest.approx(3000.0)
    assert found["relay_share"] == pytest.approx(0.2)
    assert found["line_use"] == pytest.approx(300 / 50 / 4.0)  # from the first request to its successor's last transfer
    json.dumps(found, allow_nan=False)


def test_without_any_success_the_figures_say_so():
    found = figures([row(0, error="broken", ttst=math.nan, tokens=(0, 0, 0))], line_rate=1.0)
    assert (found["completed"], found["p90_ttst_ms"], found["max_gap_ms"]) == (0, None, None)


def test_requests_are_paired_by_number():
    report = bench.new_report("test")
    report.rows[BASELINE] = [row(number, ttst=10.0 + number) for number in range(40)]
    report.rows[OURS] = [row(number, ttst=(10.0 + number) / 4) for number in reversed(range(40)) if number != 7]
    bench.conclude(report)
    ratio = report.comparisons["p90_ttst_pdd_over_cdc_pd"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.25, 0.25, 0.25))
    assert "75% below cdc_pd" in text.findings(report)[1]


async def test_a_policy_that_fails_keeps_what_it_and_the_others_showed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plays = iter((None, BenchError("md-0: ended with exit code -9")))

    async def play(orders: Any, where: Any, home: Any, speed: Any, rows: list[Row], progress: Any) -> None:
        rows += [row(number) for number in range(12)]
        if error := next(plays):
            raise error

    @asynccontextmanager
    async def emulated(fleet: Any, line: Any, policy: str) -> AsyncIterator[bench.Where]:
        yield bench.Where("http://127.0.0.1:1", None, tmp_path)

    monkeypatch.setattr(bench, "play", play)
    monkeypatch.setattr(bench, "_emulated", emulated)
    experiment = Experiment(policies=("cdc_pd", OURS), requests=12, line="user", speed=50.0)
    report = bench.new_report("test")
    await bench.run(experiment, report, tmp_path, shipped("tiny-emulated"), lambda _: None)
    assert report.failures == {OURS: "md-0: ended with exit code -9 (after 12 of 12 requests)"}
    assert report.policies["cdc_pd"]["completed"] == report.policies[OURS]["completed"] == 12
    assert "failed: pdd: md-0" in text.html(report)


def test_the_line_has_the_load_that_was_asked_for(tmp_path: Path) -> None:
    experiment = Experiment(requests=300, line_load=0.8)
    profiles = write_profiles(experiment, tmp_path, shipped("tiny-emulated"))
    assert load(next(iter(profiles.values()))).kv.bytes_per_token == 2048
    rows = simulate(experiment, "cdc_pd", profiles, site.ARENA)
    sent = sum(row.wan_bytes for row in rows)
    offered = sent / (rows[-1].due / experiment.speed) / experiment.real_line_rate
    assert offered == pytest.approx(0.8, rel=0.1)  # a page more or less a request


def test_the_simulator_shows_what_relay_decode_buys(tmp_path: Path) -> None:
    experiment = Experiment(requests=200)
    profiles = write_profiles(experiment, tmp_path, shipped("tiny-emulated"))
    found = {
        name: figures(simulate(experiment, name, profiles, site.ARENA), 1.0)["p90_ttst_ms"]
        for name in ("idc_pd", "cdc_pd", "pdd")
    }
    assert found["pdd"] < 0.54 * found["cdc_pd"]
    assert found["pdd"] < 1.25 * found["idc_pd"]


def test_a_short_comparison_from_end_to_end(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["--policy", "pdd_catch_up", "--requests", "10", "--quick", "--line", "user", "--speed", "20",
                 "--html", str(page), "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pdrelay.cli.main", "bench", "compare", *arguments], capture_output=True, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    figures_found = found["policies"]["pdd_catch_up"]
    assert figures_found.keys() >= REQUIRED
    assert (figures_found["completed"], figures_found["failed"], found["failures"]) == (10, 0, {})
    assert found["setup"]["speed"] == 10.0
    assert figures_found["wan_bytes"] > 0
    assert sum(figures_found["tokens_by_tier"].values()) == figures_found["output_tokens"]
    assert page.read_text().count("<svg") >= 4
