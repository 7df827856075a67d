"""SMG (Shepherd Model Gateway) as a peer of `pdrelay bench gateway`; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import routers


def command(programs: Path, options: argparse.Namespace) -> list[str]:
    return [
        str(programs / "smg"), "launch", "--host", "127.0.0.1", "--port", str(options.listen), "--worker-urls",
        options.engine, "--policy", "round_robin", "--log-level", "warn", "--disable-tokenizer-autoload",
        "--prometheus-port", str(options.listen + 10_000), "--prometheus-host", "127.0.0.1",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(routers.main("smg", "smg==1.13.0", command))
