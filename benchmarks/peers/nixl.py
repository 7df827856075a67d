"""NIXL over UCX-TCP as a peer of `pdrelay bench transfer`; see README.md for arguments and output.

One-way WRITEs from one process into the registered memory of another, over as many pairs of agents as connections: an
agent has one UCX worker and one connection.
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

PACKAGES = ["nixl-cu12==1.5.1", "numpy"]
REMEDY = "python benchmarks/peers/nixl.py --install"
AHEAD = 2  # requests under way on each connection
SLOTS = 8  # different chunks that each connection writes from and to, in turn
REPLY_SECONDS = 90


def main() -> int:
    options = arguments()
    if options.install:
        return install()
    if options.role:
        {"receive": receive, "send": send}[options.role](options)
        return 0
    if not python().exists():
        print(json.dumps({"peer": "nixl", "missing": REMEDY}))
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers" / "nixl"


def python() -> Path:
    return home() / "bin" / "python"


def install() -> int:
    # Without dependencies: it requires torch, which host memory does not need.
    pip = [str(python()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *PACKAGES]
    for command in ([sys.executable, "-m", "venv", "--clear", str(home())], pip):
        if (code := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
            return code
    return 0


def start(role: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [str(python()), __file__, "--role", role, "--connections", str(options.connections)]
    command += ["--bytes", str(options.bytes), "--chunk", str(options.chunk)]
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n", **os.environ}
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
        "peer": "nixl",
        "version": f"{PACKAGES[0].split('==')[1]}, UCX over tcp",
        "connections": options.connections,
        "bytes": sent["bytes"],
        "seconds": sent["seconds"],
        "cpu_seconds": sent["cpu_seconds"] + received["cpu_seconds"],
        "note": "no checksums, no encryption; progress threads sleep when idle",
    }


def ask(child: subprocess.Popen[str]) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


class End:
    """One agent with memory for SLOTS chunks."""

    def __init__(self, name: str, chunk: int) -> None:
        self.nixl = nixl = importlib.import_module("nixl_cu12._bindings")
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.pthrDelay = True, False, 100_000
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self.agent = nixl.nixlAgent(name, config)
        self.backend = self.agent.createBackend("UCX", {})
        self.chunk, self.memory = chunk, mmap.mmap(-1, SLOTS * chunk)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(self.base, SLOTS * chunk, 0, "")]), [self.backend])

    def connect(self, metadata: bytes, base: int) -> None:
        self.peer, self.far = self.agent.loadRemoteMD(metadata), base

    def post(self, slot: int) -> int:
        nixl, at = self.nixl, slot % SLOTS * self.chunk
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(self.base + at, self.chunk, 0)])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(self.far + at, self.chunk, 0)])
        request = self.agent.createXferReq(nixl.NIXL_WRITE, here, there, self.peer, b"", [self.backend])
        self.agent.postXferReq(request)
        return request

    def done(self, request: int) -> bool:
        if self.agent.getXferStatus(request) == self.nixl.NIXL_IN_PROG:
            return False
        self.agent.releaseXferReq(request)
        return True


def receive(options: argparse.Namespace) -> None:
    ends = [End(f"receiver {number}", options.chunk) for number in range(options.connections)]
    tell([[end.agent.getLocalMD().hex(), end.base] for end in ends])
    sys.stdin.readline()
    before = cpu_seconds()
    sys.stdin.readline()
    cpu = cpu_seconds() - before
    tell({"cpu_seconds": cpu, "intact": all(bytes(end.memory[:]) == pattern(options.chunk) for end in ends)})
    sys.stdin.read()


def send(options: argparse.Namespace) -> None:
    ends = [End(f"sender {number}", options.chunk) for number in range(options.connections)]
    for end, (metadata, base) in zip(ends, json.loads(sys.stdin.readline()), strict=True):
        end.connect(bytes.fromhex(metadata), base)
        end.memory[:] = pattern(options.chunk)
    write(ends, SLOTS)
    tell("warm")
    sys.stdin.readline()
    rounds = max(1, options.bytes // (options.chunk * len(ends)))
    cpu, begun = cpu_seconds(), time.monotonic()
    write(ends, rounds)
    seconds = time.monotonic() - begun
    moved = rounds * options.chunk * len(ends)
    tell({"bytes": moved, "seconds": seconds, "cpu_seconds": cpu_seconds() - cpu})
    sys.stdin.read()


def write(ends: list[End], rounds: int) -> None:
    """Writes `rounds` chunks from each end; returns when all are in the far memory."""
    left = dict.fromkeys(ends, rounds)
    flying: dict[End, list[int]] = {end: [] for end in ends}
    deadline = time.monotonic() + REPLY_SECONDS
    while any(left.values()) or any(flying.values()):
        for end in ends:
            flying[end] = [request for request in flying[end] if not end.done(request)]
            while left[end] and len(flying[end]) < AHEAD:
                flying[end].append(end.post(left[end]))
                left[end] -= 1
        if time.monotonic() > deadline:
            sys.exit("writes did not arrive in time")
        time.sleep(50e-6)


def pattern(chunk: int) -> bytes:
    return b"".join(bytes([slot + 1]) * chunk for slot in range(SLOTS))


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def tell(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
