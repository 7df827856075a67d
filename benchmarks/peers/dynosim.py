"""DynoSim (`python -m dynamo.replay`) as a peer of benchmarks/simulator.py; see README.md for arguments and output."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

VERSION = "1.4.2"
BLOCK = 512
KV_BLOCKS = 8192
"""KV blocks of a worker, 512 tokens each."""


def main() -> int:
    options = arguments()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers" / "dynosim"
    python = home / "bin" / "python"
    if options.install:
        venv.create(home, with_pip=True)
        return subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"ai-dynamo=={VERSION}"], check=False
        ).returncode
    if not python.exists():
        print(json.dumps({"peer": "dynosim", "missing": f"python {sys.argv[0]} --install"}))
        return 3
    if options.trace is None:
        sys.exit("--trace: found nothing, expected a Mooncake trace")
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(replay(python, options, Path(directory))))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--trace", type=Path, help="Mooncake JSONL, not compressed")
    parser.add_argument("--workers", type=int, default=4, help="of prefill, and of decode")
    parser.add_argument("--records", type=Path, help="keep its record of each request here")
    return parser.parse_args()


def replay(python: Path, options: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Runs it once; seconds include its start, as a user waits for it."""
    records = options.records or directory / "records.jsonl"
    engine = {"block_size": BLOCK, "num_gpu_blocks": KV_BLOCKS}
    began = time.perf_counter()
    done = subprocess.run(
        [
            python, "-m", "dynamo.replay", options.trace,
            "--num-prefill-workers", str(options.workers), "--num-decode-workers", str(options.workers),
            "--router-mode", "kv_router", "--trace-format", "mooncake", "--trace-block-size", str(BLOCK),
            "--report-json", directory / "report.json", "--report-jsonl", records,
            "--prefill-engine-args", json.dumps({**engine, "worker_type": "prefill"}),
            "--decode-engine-args", json.dumps({**engine, "worker_type": "decode"}),
        ],
        env={**os.environ, "DYN_LOG": "error"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"dynamo.replay: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((directory / "report.json").read_text())
    return {
        "peer": "dynosim", "version": VERSION, "seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime,
        "completed": report["completed_requests"], "reused": report["prefix_cache_reused_ratio"],
        "mean_ttft_ms": report["mean_ttft_ms"], "p90_ttft_ms": report["p90_ttft_ms"],
        "mean_tpot_ms": report["mean_tpot_ms"], "mean_e2el_ms": report["mean_e2e_latency_ms"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
