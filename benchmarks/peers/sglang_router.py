"""sglang-router as a peer of `pdrelay bench gateway`; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import routers


def command(programs: Path, options: argparse.Namespace) -> list[str]:
    return [
        str(programs / "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port",
        str(options.listen), "--worker-urls", options.engine, "--policy", "round_robin", "--log-level", "warn",
        "--prometheus-port", str(options.listen + 10_000), "--prometheus-host", "127.0.0.1",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(routers.main("sglang_router", "sglang-router==0.3.2", command))
