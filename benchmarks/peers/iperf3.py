"""iperf3 as a peer of `pdrelay bench transfer`; see README.md for arguments and output."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import socket
import subprocess
import sys

REMEDY = "install iperf3: apt-get install -y iperf3, dnf install iperf3 or brew install iperf3"


def main() -> int:
    options = arguments()
    if options.install:
        print(REMEDY, file=sys.stderr)
        return 0 if shutil.which("iperf3") else 1
    if shutil.which("iperf3") is None:
        print(json.dumps({"peer": "iperf3", "missing": REMEDY}))
        return 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    port = str(options.listen or free_port())
    server = subprocess.Popen(
        [*inside(options.receiver_namespace), "iperf3", "--server", "--one-off", "--forceflush", "--port", port],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until_listening(server)
        report = run_client(options, port)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(report))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1 << 29)
    parser.add_argument("--chunk", type=int, default=1 << 20)
    parser.add_argument("--sender-namespace")
    parser.add_argument("--receiver-namespace")
    parser.add_argument("--listen", type=int)
    parser.add_argument("--address", default="127.0.0.1")
    return parser.parse_args()


def inside(namespace: str | None) -> list[str]:
    return ["ip", "netns", "exec", namespace] if namespace else []


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def wait_until_listening(server: subprocess.Popen[str]) -> None:
    for line in server.stdout:
        if "listening" in line:
            return
    sys.exit(f"the iperf3 server ended with exit code {server.wait()}")


def run_client(options: argparse.Namespace, listens: str) -> dict[str, object]:
    host, _, port = options.address.partition(":")
    client = subprocess.run(
        [*inside(options.sender_namespace), "iperf3", "--client", host, "--port", port or listens, "--json",
         "--parallel", str(options.connections), "--bytes", str(options.bytes), "--length", str(options.chunk)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    report = json.loads(client.stdout or "{}")
    if client.returncode or "error" in report:
        sys.exit(f"iperf3: {report.get('error', client.stderr.strip())}")
    received, cpu = report["end"]["sum_received"], report["end"]["cpu_utilization_percent"]
    seconds = received["seconds"]
    return {
        "peer": "iperf3",
        "version": re.sub(r"^iperf ", "", report["start"]["version"]),
        "connections": options.connections,
        "bytes": received["bytes"],
        "seconds": seconds,
        "cpu_seconds": (cpu["host_total"] + cpu["remote_total"]) / 100 * seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
