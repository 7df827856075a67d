"""`pdrelay simulate` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from pdrelay.cli.main import main

SMALL = ["simulate", "trio", "--requests", "10"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def figures(*arguments: str) -> dict[str, object]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_json_has_the_keys_of_vllm_bench_serve() -> None:
    found = figures(*SMALL)
    keys = {"completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
            "output_throughput", "request_goodput", "total_token_throughput", "duration"}  # fmt: skip
    keys |= {f"{figure}_{name}_ms" for name in ("ttft", "tpot", "e2el", "ttst") for figure in ("mean", "median", "p99")}
    assert keys <= set(found)
    assert found["completed"] > 10  # type: ignore[operator]  # sessions have several turns
    assert {"a->b"} == set(found["lines"])  # type: ignore[call-overload]


def test_the_table_says_how_close_the_workload_comes() -> None:
    result = call("simulate", "prfaas", "--requests", "2000")
    assert result.exit_code == 0
    assert "time to second token" in result.output
    assert re.search(r"prompt_mean +. 2.,?...", result.output)
    assert re.search(r"2,000 of 2,000 requests in", result.output)


def test_every_file_that_is_asked_for(tmp_path: Path) -> None:
    records, page, trace = tmp_path / "r.jsonl", tmp_path / "r.html", tmp_path / "t.json"
    found = figures(*SMALL, "--records", str(records), "--html", str(page), "--perfetto", str(trace))
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(rows) == found["completed"]
    assert found["failed"] == 0
    assert all(row["finished"] >= row["first_token"] >= row["arrival"] for row in rows)
    text = page.read_text()
    assert not re.search(r'(src|href)="', text)  # self-contained
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 8
    for chart in charts:
        ElementTree.fromstring(chart)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"].split()[0] for event in spans} >= {"prefill", "transfer", "decode"}
    by_track: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda span: span["ts"]):  # spans of one track never overlap
        track = (span["pid"], span["tid"])
        assert span["ts"] >= by_track.get(track, 0.0) - 1e-3
        by_track[track] = span["ts"] + span["dur"]


def test_a_sweep_runs_every_combination() -> None:
    found = figures(*SMALL, "--sweep", "line.0.rate=10mbit,1gbit", "--sweep", "policy.name=pdd,cdc_pd", "--jobs", "2")
    runs: list[dict[str, dict[str, float]]] = found["runs"]  # type: ignore[assignment]
    assert [run["parameters"] for run in runs] == [
        {"line.0.rate": rate, "policy.name": name} for rate in ("10mbit", "1gbit") for name in ("pdd", "cdc_pd")
    ]
    second_token = [run["result"]["p90_ttst_ms"] for run in runs]
    assert second_token[1] > 2 * second_token[0]  # the relay hides a thin line
    assert second_token[3] < 2 * second_token[2]  # a wide one needs no hiding
    assert "line.0.rate" in call(*SMALL, "--sweep", "line.0.rate=10mbit", "--jobs", "1").output


def test_a_trace_with_a_bad_row(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"input_length": 600, "output_length": 5}
    rows = [{"timestamp": 20_000 * i, **row, "hash_ids": [1, i + 9]} for i in range(5)]
    trace.write_text("\n".join([*map(json.dumps, rows), "oops"]))
    result = call("simulate", "trio", "--trace", str(trace))
    assert result.exit_code == 2
    assert re.search(r"t.jsonl:6: row: found 'oops', expected a JSON object .*--skip-bad", result.output)
    found = figures("simulate", "trio", "--trace", str(trace), "--skip-bad")
    assert (found["completed"], found["skipped_rows"]) == (5, 1)
    assert found["cached_tokens"] == 4 * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "scenario: found 'nothing', expected a .toml file or one of prfaas, trio"),
        (["gone.toml"], "gone.toml: cannot be read"),
        (["trio", "--set", "policy"], "change: found 'policy', expected KEY=VALUE"),
        (["trio", "--set", "line.7.rate=1gbit"], "change: line.7.rate: found '7', expected one of 0"),
        (["trio", "--set", "line.0.rate=fast"], r"line\[0\].rate: found 'fast', expected a rate such as"),
        (["trio", "--set", "line.0.colour=red"], "line.*colour: found a key that nothing reads"),
        (["trio", "--set", "requests=0"], "requests: found 0, expected at least 1"),
        (["trio", "--set", "workload.rate=0"], "workload.rate: found 0.0, expected a number above 0"),
        (["trio", "--set", "instance.p.profile=h100"], "instance.p.profile: found 'h100', expected one of smollm2"),
        (["trio", "--set", "instance.p.cores=x"], "instance.p.cores: found 'x', expected one of"),
        (["trio", "--set", "profile.smollm2.file=h100"], "profile: found 'h100', expected one of"),
        (["trio", "--set", 'line.0.outages=[["9s", "1s"]]'], r"line\[0\].outages: found .*expected rising pairs"),
        (["trio", "--sweep", "line.0.rate"], "--sweep: found 'line.0.rate', expected KEY=VALUE,VALUE"),
        (["trio", "--sweep", "seed=1,2", "--html", "x.html"], "--html is of one run"),
        (["trio", "--requests", "5", "--records", "/nowhere/x"], "/nowhere/x: cannot be written"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = call("simulate", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["trio", "prfaas"])
def test_shipped_scenarios_run(name: str) -> None:
    assert figures("simulate", name, "--requests", "20")["failed"] == 0


def test_profiles_from_every_source() -> None:
    changed = ["--set", "profile=[{name='smollm2', model='Qwen3-235B', chip='H200', max_num_seqs=8}]"]
    assert figures(*SMALL, *changed)["failed"] == 0
    changed = [
        "--set", "profile=[{name='x', file='smollm2-135m-cpu'}, {name='smollm2', base='x', chip='E', price=1.0}]",
    ]  # fmt: skip
    faster = figures(*SMALL, *changed)["mean_tpot_ms"]
    assert faster < figures(*SMALL)["mean_tpot_ms"]  # type: ignore[operator]
