"""Runs the load tools that people use against our gateway, and says what each thinks of it.

    python benchmarks/load_tools.py --install            # into ~/.cache/pdrelay/peers, one environment a tool
    python benchmarks/load_tools.py --url http://127.0.0.1:8000 --tokenizer DIRECTORY
    python benchmarks/load_tools.py                      # starts an emulated deployment for it

Prints one JSON object: per tool its version, exit code, requests that it counts as good and as failed, and the last
lines of its output where it complains. Standard library alone, beside an installed pdrelay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

REQUESTS = 20
SECONDS = 300


VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`: the command itself looks for a package called vllm, which builds for CPUs are not."""


class Tool(NamedTuple):
    """A tool: what installs it, its command line, and how to read what it found."""

    package: str
    command: Callable[[Path, argparse.Namespace, Path], list[str]]
    counts: Callable[[Path, str], tuple[int, int]]  # good and failed requests


def home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdrelay" / "peers"


def vllm_command(_: Path, options: argparse.Namespace, out: Path) -> list[str]:
    return [
        sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", "openai-chat",
        "--base-url", options.url, "--endpoint", "/v1/chat/completions", "--model", options.model, "--tokenizer",
        options.tokenizer, "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32",
        "--num-prompts", str(REQUESTS), "--request-rate", "5", "--ignore-eos", "--save-result", "--result-filename",
        str(out / "vllm.json"),
    ]  # fmt: skip


def vllm_counts(out: Path, _: str) -> tuple[int, int]:
    found = json.loads((out / "vllm.json").read_text())
    return found["completed"], found.get("failed", found["num_prompts"] - found["completed"])


def guidellm_command(programs: Path, options: argparse.Namespace, out: Path) -> list[str]:
    return [
        str(programs / "guidellm"), "run", "--backend", f"kind=openai_http,target={options.url},model={options.model}",
        "--profile", "kind=constant,rate=5", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--tokenizer", f"kind=huggingface_auto,model={options.tokenizer}",
        "--output", f"kind=json,path={out / 'guidellm.json'}", "--disable-console-interactive",
    ]  # fmt: skip


def guidellm_counts(out: Path, _: str) -> tuple[int, int]:
    totals = [run["metrics"]["request_totals"] for run in json.loads((out / "guidellm.json").read_text())["benchmarks"]]
    return sum(t["successful"] for t in totals), sum(t["errored"] + t["incomplete"] for t in totals)


def aiperf_command(programs: Path, options: argparse.Namespace, out: Path) -> list[str]:
    return [
        str(programs / "aiperf"), "profile", "--model", options.model, "--url", options.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", options.tokenizer, "--request-count", str(REQUESTS), "--concurrency", "4",
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32", "--artifact-dir", str(out / "aiperf"),
        "--extra-inputs", "ignore_eos:true", "--ui", "none",
    ]  # fmt: skip


def aiperf_counts(out: Path, _: str) -> tuple[int, int]:
    found = json.loads(next((out / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    failed = found.get("error_request_count") or {}
    return int(found["request_count"]["avg"]), int(failed.get("avg", 0))


TOOLS = {
    "vllm": Tool("", vllm_command, vllm_counts),
    "guidellm": Tool("guidellm==0.8.*", guidellm_command, guidellm_counts),
    "aiperf": Tool("aiperf==0.13.*", aiperf_command, aiperf_counts),
}


def main() -> int:
    options = arguments()
    chosen = options.tool or list(TOOLS)
    if options.install:
        return max((install(name) for name in chosen if TOOLS[name].package), default=0)
    found = {}
    with deployment(options), tempfile.TemporaryDirectory() as directory:
        for name in chosen:
            found[name] = attempt(name, options, Path(directory))
    print(json.dumps(found, indent=1))
    return int(any(result.get("failed") or result.get("exit_code") for result in found.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--tool", action="append", choices=list(TOOLS))
    parser.add_argument("--url", help="of a gateway that runs; default: one is started")
    parser.add_argument("--model", default="emulated")
    parser.add_argument("--tokenizer", help="directory of the model's tokenizer")
    return parser.parse_args()


def install(name: str) -> int:
    place = home() / name
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", TOOLS[name].package]
    for command in ([sys.executable, "-m", "venv", "--clear", str(place)], pip):
        if (code := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
            return code
    return 0


@contextlib.contextmanager
def deployment(options: argparse.Namespace) -> Iterator[None]:
    """Ours, emulated, unless one is named."""
    if options.url:
        yield
        return
    with tempfile.TemporaryDirectory() as directory:
        up = [sys.executable, "-m", "pdrelay.cli.main", "up", "--emulated", "--run-dir", directory, "--port", "8137"]
        down = [sys.executable, "-m", "pdrelay.cli.main", "down", "--run-dir", directory]
        subprocess.run(up, check=True, stdout=sys.stderr)
        try:
            config = (Path(directory) / "pdrelay.toml").read_text()
            options.url = "http://127.0.0.1:8137"
            options.tokenizer = options.tokenizer or re.findall(r'^path = "(.*)"$', config, re.MULTILINE)[0]
            options.model = re.findall(r'^name = "(.*)"$', config, re.MULTILINE)[0]
            yield
        finally:
            subprocess.run(down, check=False, stdout=sys.stderr)


def attempt(name: str, options: argparse.Namespace, out: Path) -> dict[str, object]:
    tool, programs = TOOLS[name], home() / name / "bin"
    if tool.package and not (programs / "python").exists():
        return {"missing": f"python benchmarks/load_tools.py --install --tool {name}"}
    command = tool.command(programs, options, out)
    environment = {**os.environ, "OPENAI_API_KEY": "none"}
    if name != "aiperf":  # which then takes a directory for the name of a repository
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=out, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"command": shlex.join(command), "exit_code": 1, "said": [f"no end after {SECONDS} s"]}
    said = (done.stderr + done.stdout).strip().splitlines()
    result: dict[str, object] = {"command": shlex.join(command), "exit_code": done.returncode}
    try:
        result["good"], result["failed"] = tool.counts(out, done.stdout)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        result["said"] = [*said[-12:], f"its result cannot be read: {type(error).__name__}: {error}"]
    if done.returncode:
        result["said"] = said[-12:]
    return result


if __name__ == "__main__":
    sys.exit(main())
