"""vllm-router as a peer of `pdrelay bench gateway`; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import routers


def command(programs: Path, options: argparse.Namespace) -> list[str]:
    return [
        str(programs / "vllm-router"), "--host", "127.0.0.1", "--port", str(options.listen), "--worker-urls",
        options.engine, "--policy", "round_robin", "--log-level", "warning", "--prometheus-port",
        str(options.listen + 10_000), "--prometheus-host", "127.0.0.1",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(routers.main("vllm_router", "vllm-router==0.1.17", command))
