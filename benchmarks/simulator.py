"""How fast the simulator is: beside DynoSim on one trace in the same run, and by the number of requests.

    python benchmarks/simulator.py --trace conversation_trace.jsonl
    python benchmarks/simulator.py --growth 10000 100000 1000000

The trace is Mooncake's (12,031 conversations, https://github.com/kvcache-ai/Mooncake), not compressed. DynoSim runs on
4 prefill and 4 decode workers of its default timing; ours is fitted to the prefills that it ran alone and to its decode
intervals, and the line is made wide, since DynoSim gives each transfer a delay of its own. Both run to their JSON
results with one record a request, one after the other, in rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

PEER = Path(__file__).parent / "peers" / "dynosim.py"
MISSING = 3

KV_BYTES = 131_072  # of a token
FASTEST_STEP = 5.7e-3  # seconds; DynoSim's decode interval without context
CAPACITY = 8192 * 512 * KV_BYTES

SCENARIO = """
[policy]
name = "cdc_pd"

[[profile]]
name = "fitted"
file = "{profile}"

[[instance]]
name = "p"
count = 4
cluster = "a"
roles = ["prefill"]
profile = "fitted"

[[instance]]
name = "d"
count = 4
cluster = "b"
roles = ["decode"]
profile = "fitted"

[[line]]
source = "a"
target = "b"
rate = "8000tbit"
rtt = "0s"
connections = 100000
"""

PROFILE = """
description = "fitted to DynoSim's default timing"

[kv] # {kv_bytes} bytes a token
layers = 32
heads = 8
head_size = 128
dtype = "bfloat16"
page_tokens = 512
capacity = "{capacity}B"

[prefill]
fixed = {fixed}
per_token = {per_token}
per_pair = {per_pair}

[decode]
fixed = {step}
per_sequence = 0.0
per_context_token = {per_context}

[extend]
fixed = 0.006
per_token = 1e-5
per_pair = 0.0

[limits]
max_num_seqs = 256
prefill_chunk = 8192

[vocabulary]
first = 1000
last = 40000
eos = 2
"""

GROWTH = ("workload.generator='pdd'", "workload.rate=0.5", "workload.prompt=1024", "workload.output=60.0")
"""Three instances, a line that is half full."""


def main() -> int:
    options = arguments()
    if options.trace is not None:
        beside_dynosim(options.trace.resolve(), options.rounds)
    for count in options.growth:
        grow(count)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=int, nargs="*", default=[], metavar="REQUESTS")
    return parser.parse_args()


# ---- beside DynoSim ----


def beside_dynosim(trace: Path, rounds: int) -> None:
    """Prints processor times, their ratio, and what both say."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        records = directory / "records.jsonl"
        peers = [run_peer(trace, records)]
        scenario = write_scenario(directory, records)
        ours = [run_ours(trace, scenario, directory)]
        for _ in range(rounds - 1):
            peers.append(run_peer(trace, records))
            ours.append(run_ours(trace, scenario, directory))
    for key in ("cpu_seconds", "seconds"):
        ratios = [peer[key] / our[key] for peer, our in zip(peers, ours, strict=True)]
        medians = [statistics.median(run[key] for run in runs) for runs in (ours, peers)]
        print(
            f"{key}: ours {medians[0]:.1f}, DynoSim {medians[1]:.1f}; "
            f"DynoSim by ours in the same round {statistics.median(ratios):.2f} (least {min(ratios):.2f})"
        )
    for key in ("completed", "reused", "mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"):
        print(f"{key}: ours {ours[-1][key]:.4g}, DynoSim {peers[-1][key]:.4g}")


def run_peer(trace: Path, records: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PEER, "--trace", trace, "--records", records], capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode:
        sys.exit(f"DynoSim: {found.get('missing') or done.stderr.strip()}")
    return found


def run_ours(trace: Path, scenario: Path, directory: Path) -> dict[str, Any]:
    before, began = cpu_of_children(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pdrelay.cli.main", "simulate", scenario, "--trace", trace, "--json",
         "--records", directory / "ours.jsonl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout)
    found["reused"] = found["cached_tokens"] / found["total_input_tokens"]
    return found | {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_of_children() - before}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_scenario(directory: Path, records: Path) -> Path:
    """Our profile of DynoSim's timing, and the deployment."""
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    fixed, per_token, per_pair = fit_prefill(rows)
    itl = statistics.median(row["itl_ms"] for row in rows if row["output_length"] > 50) / 1e3
    context = 7 * 12_000  # tokens in a worker's batch, about
    (directory / "fitted.toml").write_text(
        PROFILE.format(
            kv_bytes=KV_BYTES, capacity=CAPACITY, fixed=fixed, per_token=per_token, per_pair=per_pair,
            step=FASTEST_STEP, per_context=(itl - FASTEST_STEP) / context,
        )
    )  # fmt: skip
    path = directory / "scenario.toml"
    path.write_text(SCENARIO.format(profile=directory / "fitted.toml"))
    return path


def fit_prefill(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Seconds: fixed, of an uncached token, of a pair of tokens; from the prefills that no other ran beside."""
    lone = [row for worker in by_worker(rows) for row in alone(worker)]
    uncached = np.array([row["input_length"] - row["reused_input_tokens"] for row in lone], dtype=float)
    cached = np.array([row["reused_input_tokens"] for row in lone], dtype=float)
    seconds = np.array([row["source_held_ms"] - row["prefill_admit_ms"] for row in lone]) / 1e3
    terms = np.c_[np.ones(len(lone)), uncached, uncached * (cached + uncached / 2)]
    found = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(lone)), rcond=None)[0].clip(0)
    off = np.median(np.abs(terms @ found / seconds - 1))
    print(f"prefill fitted to {len(lone)} of {len(rows)} requests, median error {off:.1%}")
    return float(found[0]), float(found[1]), float(found[2])


def by_worker(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    workers = defaultdict(list)
    for row in rows:
        workers[row["prefill_worker_idx"]].append(row)
    return [sorted(worker, key=lambda row: row["prefill_admit_ms"]) for worker in workers.values()]


def alone(worker: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found, busy_until = [], -1.0
    for row, after in zip(worker, [*worker[1:], None], strict=True):
        free_before = busy_until <= row["prefill_admit_ms"] + 0.01
        free_behind = after is None or after["prefill_admit_ms"] >= row["source_held_ms"] - 0.01
        if free_before and free_behind:
            found.append(row)
        busy_until = max(busy_until, row["source_held_ms"])
    return found


# ---- growth ----


def grow(count: int) -> None:
    """Prints processor time a request, and the largest memory, of a run of `count` requests in a process of its own."""
    changes = [argument for change in GROWTH for argument in ("--set", change)]
    child = subprocess.Popen(
        [sys.executable, "-m", "pdrelay.cli.main", "simulate", "trio", "--requests", str(count), "--json", *changes],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"pdrelay simulate failed with status {status}")
    figures = json.loads(output)
    seconds = used.ru_utime + used.ru_stime
    print(
        f"{figures['completed']:,} requests: {seconds:,.1f} s of processor time, {seconds / count * 1e3:.3f} ms each, "
        f"at most {used.ru_maxrss / 1e3:,.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
