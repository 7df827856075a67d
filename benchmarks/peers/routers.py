"""What the scripts of the routers share: installing one into an environment of its own, and becoming it.

Standard library alone. See README.md for the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

Command = Callable[[Path, argparse.Namespace], list[str]]


def main(peer: str, package: str, command: Command) -> int:
    """`command` makes the router's command line from the environment's bin directory and the options."""
    options = _arguments()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers" / peer
    programs = home / "bin"
    if options.install:
        return _install(home, package)
    if not (programs / "python").exists():
        print(json.dumps({"peer": peer, "missing": f"python benchmarks/peers/{peer}.py --install"}))
        return 3
    if options.version:
        print(json.dumps({"peer": peer, "version": package.partition("==")[2]}))
        return 0
    line = command(programs, options)
    # No proxy: engine and clients are on this machine. In this process's place, so that a signal to it ends the router.
    os.execve(line[0], line, {**os.environ, "NO_PROXY": "*", "no_proxy": "*"})  # noqa: S606 - no shell is wanted
    return 0


def _install(home: Path, package: str) -> int:
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    for line in ([sys.executable, "-m", "venv", "--clear", str(home)], pip):
        if (code := subprocess.run(line, stdout=sys.stderr, check=False).returncode) != 0:
            return code
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--listen", type=int, default=8000)
    parser.add_argument("--engine", default="http://127.0.0.1:8001")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    assert urlsplit(options.engine).port, "an engine's URL has a port"
    return options
