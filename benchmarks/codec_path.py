"""Wire codecs on the whole path: client, gateway, prefill, depot, link, depot, main decode, on real vLLM.

    python benchmarks/codec_path.py [--prompts 20] [--prompt-tokens 512] [--tokens 64] [--dtype bfloat16]

Starts the deployment of `pdrelay up` once for each codec, decodes the same prompts greedily on main decode, and prints
one JSON object: how many tokens are those of the run without codec, and what the depots counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import httpx
import msgspec
from tokenizers import Tokenizer

from pdrelay.bench.codec import prompts_of
from pdrelay.bench.machine import describe
from pdrelay.cli.local.model import ensure_checkpoint
from pdrelay.cluster.ports import free_addresses

CODECS = ("none", "zstd", "fp8", "int8")
CLIENTS = 2


def pdrelay(*arguments: str) -> str:
    command = [sys.executable, "-m", "pdrelay.cli.main", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def complete(url: str, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    extension = {"trace": True, "pipeline": "p_md"}
    response = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, "pdrelay": extension}, timeout=600)
    response.raise_for_status()
    ids: list[int] = response.json()["pdrelay"]["token_ids"]
    return ids


def counters(run_dir: str) -> dict[str, float]:
    """What both depots counted, without their labels."""
    found = json.loads(pdrelay("status", "--run-dir", run_dir, "--json"))["counters"]
    sender, receiver = found["host-a"], found["host-b"]

    def value(rows: dict[str, float], name: str) -> float:
        return sum(number for sample, number in rows.items() if sample.startswith(f"pdrelay_depot_{name}{{"))

    return {
        "payload_bytes": value(sender, "sent_bytes_total"),
        "wire_bytes": value(sender, "sent_wire_bytes_total"),
        "encode_seconds": value(sender, "link_encode_seconds_total"),
        "decode_seconds": value(receiver, "link_decode_seconds_total"),
        "lossy_pages": value(receiver, "lossy_pages"),
        "corrupt_parts": value(receiver, "corrupt_parts_total"),
    }


def run(codec: str, prompts: list[list[int]], options: argparse.Namespace) -> tuple[list[list[int]], dict[str, float]]:
    """The token ids of all prompts, and the counters, of one deployment."""
    port = free_addresses(1)[0].rpartition(":")[2]
    with tempfile.TemporaryDirectory(prefix="pdrelay-codec-") as run_dir:
        try:
            line = ["--wan-rate", "unlimited", "--wan-rtt", "0ms", "--wan-codec", codec]
            pdrelay("up", "--run-dir", run_dir, "--port", port, "--debug", "--json", "--dtype", options.dtype, *line)
            with ThreadPoolExecutor(CLIENTS) as clients:
                url = f"http://127.0.0.1:{port}"
                ids = list(clients.map(lambda prompt: complete(url, prompt, options.tokens), prompts))
            return ids, counters(run_dir)
        finally:
            pdrelay("down", "--run-dir", run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(ensure_checkpoint(), "tokenizer.json")))
    prompts = prompts_of(lambda text: tokenizer.encode(text).ids, options.prompts, options.prompt_tokens)
    report: dict[str, object] = {"bench": "codec_path", "machine": msgspec.to_builtins(describe()), **vars(options)}
    exact: list[list[int]] = []
    for codec in CODECS:
        ids, counted = run(codec, prompts, options)
        exact = exact or ids
        same = [[a == b for a, b in zip(one, other, strict=True)] for one, other in zip(exact, ids, strict=True)]
        report[codec] = {
            "ratio": counted["payload_bytes"] / counted["wire_bytes"],
            "agreement": fmean(place for places in same for place in places),
            "unchanged": sum(all(places) for places in same),
            **counted,
        }
        print(f"{codec}: {report[codec]}", file=sys.stderr)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
