"""Mooncake's transfer engine over TCP as a peer of `pdrelay bench transfer`; see README.md for arguments and output.

One-way writes from one process into the registered memory of another, in requests of some chunks for each connection.
How many TCP connections there are is the engine's choice: it opens them as its slices need.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ["mooncake-transfer-engine-non-cuda==0.3.13.post1"]
REMEDY = "python benchmarks/peers/mooncake.py --install, and libibverbs1 and librdmacm1 from the distribution"
AHEAD = 2  # chunks of a request for each connection
SLOTS = 8  # different chunks for each connection, written in turn


def main() -> int:
    options = arguments()
    if options.install:
        return install()
    if options.role:
        {"receive": receive, "send": send}[options.role](options)
        return 0
    if not python().exists():
        print(json.dumps({"peer": "mooncake", "missing": REMEDY}))
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    children = [start(role, options) for role in ("receive", "send")]
    try:
        print(json.dumps(measure(*children, options)))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1 << 29)
    parser.add_argument("--chunk", type=int, default=1 << 20)
    parser.add_argument("--role", choices=("receive", "send"), help="for the script's own two processes")
    return parser.parse_known_args()[0]


def home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers" / "mooncake"


def python() -> Path:
    return home() / "bin" / "python"


def install() -> int:
    pip = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *PACKAGES]
    for command in ([sys.executable, "-m", "venv", "--clear", str(home())], pip):
        if (code := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
            return code
    return 0


def start(role: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [
        str(python()),
        "-P",
        __file__,  # whose own name is that of the package
        "--role",
        role,
        "--connections",
        str(options.connections),
    ]
    command += ["--bytes", str(options.bytes), "--chunk", str(options.chunk)]
    environment = {"MC_LOG_LEVEL": "ERROR", **os.environ}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def measure(
    receiver: subprocess.Popen[str], sender: subprocess.Popen[str], options: argparse.Namespace
) -> dict[str, object]:
    sender.stdin.write(receiver.stdout.readline())
    sender.stdin.flush()
    sender.stdout.readline()  # connected and warm
    ask(receiver)
    ask(sender)
    sent = json.loads(sender.stdout.readline() or sys.exit("the sender ended"))
    ask(receiver)
    received = json.loads(receiver.stdout.readline() or sys.exit("the receiver ended"))
    if not received["intact"]:
        sys.exit("other bytes arrived than were sent")
    return {
        "peer": "mooncake",
        "version": PACKAGES[0].split("==")[1],
        "connections": options.connections,
        "bytes": sent["bytes"],
        "seconds": sent["seconds"],
        "cpu_seconds": sent["cpu_seconds"] + received["cpu_seconds"],
        "note": "no checksums, no encryption; the engine chooses its connections",
    }


def ask(child: subprocess.Popen[str]) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


class End:
    """An engine with memory for SLOTS chunks of each connection."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        require(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "the engine does not start")
        self.chunk, self.size = options.chunk, options.connections * SLOTS * options.chunk
        self.memory = mmap.mmap(-1, self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        require(self.engine.register_memory(self.base, self.size), "the memory cannot be registered")

    def write(self, peer: str, far: int, connections: int, rounds: int) -> None:
        """`rounds` requests, each of AHEAD chunks for every connection; returns when all are in the far memory."""
        for number in range(rounds):
            starts = [(number * AHEAD + at) % (connections * SLOTS) * self.chunk for at in range(connections * AHEAD)]
            here, there = [self.base + at for at in starts], [far + at for at in starts]
            lengths = [self.chunk] * len(starts)
            require(self.engine.batch_transfer_sync_write(peer, here, there, lengths), "a write failed")


def require(code: int, trouble: str) -> None:
    if code:
        sys.exit(f"mooncake: {trouble} (code {code})")


def receive(options: argparse.Namespace) -> None:
    end = End(options)
    tell([f"127.0.0.1:{end.engine.get_rpc_port()}", end.base])
    sys.stdin.readline()
    before = cpu_seconds()
    sys.stdin.readline()
    cpu = cpu_seconds() - before
    tell({"cpu_seconds": cpu, "intact": bytes(end.memory[:]) == pattern(options)})
    sys.stdin.read()


def send(options: argparse.Namespace) -> None:
    end = End(options)
    peer, far = json.loads(sys.stdin.readline())
    end.memory[:] = pattern(options)
    end.write(peer, far, options.connections, SLOTS * options.connections)
    tell("warm")
    sys.stdin.readline()
    request = options.chunk * options.connections * AHEAD
    rounds = max(1, options.bytes // request)
    cpu, begun = cpu_seconds(), time.monotonic()
    end.write(peer, far, options.connections, rounds)
    seconds = time.monotonic() - begun
    tell({"bytes": rounds * request, "seconds": seconds, "cpu_seconds": cpu_seconds() - cpu})
    sys.stdin.read()


def pattern(options: argparse.Namespace) -> bytes:
    return b"".join(bytes([slot + 1]) * options.chunk for slot in range(options.connections * SLOTS))


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def tell(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
