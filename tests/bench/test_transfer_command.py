"""`pdrelay bench transfer` as people run it, at small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PEER = """
import json, sys
assert sys.argv[1:3] == ["--connections", "2"]
size = int(sys.argv[sys.argv.index("--bytes") + 1])
print(json.dumps({"peer": "iperf3", "version": "9", "connections": 2, "bytes": size, "seconds": 0.5, "cpu_seconds": 1}))
"""
MISSING = """
import json, sys
print(json.dumps({"peer": "nixl", "missing": "install it so"}))
sys.exit(3)
"""
BROKEN = "import sys; sys.exit('it broke')"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    peers = tmp_path_factory.mktemp("peers")
    for name, script in (("iperf3", PEER), ("nixl", MISSING), ("mooncake", BROKEN)):
        (peers / f"{name}.py").write_text(script)
    sizes = ["--quick", "--size", "2MiB", "--layers", "4", "--connections", "2"]
    return run(
        *sizes, "--only", "shaped", "--only", "throughput", "--line", "user", "--line-rate", "40mbit",
        "--peers", str(peers),
    )  # fmt: skip


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "pdrelay.cli.main", "bench", "transfer", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_report_says_where_when_and_with_what_it_was_made(report: tuple[int, dict[str, Any]]) -> None:
    _, found = report
    assert {"date", "pdrelay", "python", "kernel", "processor", "cores", "load_before"} <= found["machine"].keys()
    assert found["command"].startswith("pdrelay bench transfer --only shaped --only throughput --connections 2 ")
    assert found["table2"] is None


def test_every_contestant_moved_every_byte_in_every_round(report: tuple[int, dict[str, Any]]) -> None:
    result = report[1]["throughput"]
    rows = {row["name"]: row for row in result["rows"]}
    assert result["bytes"] == 2 << 20
    for name in ("bare loop, plain", "bare loop, TLS", "pdrelay, plain", "pdrelay, TLS", "iperf3"):
        row = rows[name]
        assert row["status"] == "ok", row
        assert [sample["bytes"] for sample in row["samples"]] == [result["bytes"]] * result["rounds"]
        assert row["bytes_per_second"]["low"] <= row["bytes_per_second"]["value"] <= row["bytes_per_second"]["high"]
        assert all(sample["seconds"] > 0 and sample["cpu_seconds"] > 0 for sample in row["samples"])
    ours, loop = rows["pdrelay, TLS"], rows["bare loop, TLS"]
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(ours["samples"], loop["samples"], strict=True))
    assert ours["ratio"]["value"] == pytest.approx(ratios[len(ratios) // 2])
    assert rows["iperf3"]["cpu_seconds_per_gb"] == pytest.approx(1 / (2 << 20) * 1e9)
    assert rows["iperf3"]["peer"]["version"] == "9"


def test_a_missing_peer_is_named_with_its_remedy_and_a_broken_one_fails_the_run(
    report: tuple[int, dict[str, Any]],
) -> None:
    code, found = report
    rows = {row["name"]: row for row in found["throughput"]["rows"]}
    assert (rows["nixl"]["status"], rows["nixl"]["detail"]) == ("missing", "install it so")
    assert (rows["mooncake"]["status"], rows["mooncake"]["detail"]) == ("failed", "it broke")
    assert (code, found["failures"]) == (1, {"throughput, mooncake": "it broke"})


def test_the_shaped_line_holds_its_rate_and_compares_with_iperf3(report: tuple[int, dict[str, Any]]) -> None:
    result = report[1]["shaped"]
    rows = {row["name"]: row for row in result["rows"]}
    assert (result["line"], result["rate"], result["rounds"]) == ("user", 5e6, 5)
    ours = rows["pdrelay, TLS"]
    assert (ours["status"], ours["beside"]) == ("ok", "iperf3")
    assert all(sample["bytes"] == result["bytes"] for sample in ours["samples"])
    assert all(sample["bytes"] / sample["seconds"] < 1.2 * result["rate"] for sample in ours["samples"])
