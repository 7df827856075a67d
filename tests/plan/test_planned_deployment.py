"""A deployment file that `pdrelay plan` wrote serves, with emulated engines in place of the planned ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdrelay.cli.local.model import ensure_emulated
from pdrelay.cli.main import main
from pdrelay.cluster import config
from pdrelay.cluster.ports import free_addresses
from pdrelay.perf.profile import shipped

sys.path.append(str(Path(__file__).parents[1] / "system"))
from deployment import Deployment, free_port, running_file

NAMES = ["host-h200-prefill-0", "host-h20-prefill-0", "host-h20-decode-0", "h200-prefill-0", "h20-prefill-0",
         "h20-decode-0"]  # fmt: skip


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    base = tmp_path_factory.mktemp("planned")
    written, port = base / "pdrelay.toml", free_port()
    changes = ["pool.h200.count=1", "pool.h20.count=2", "line.0.rate=200mbit"]
    result = CliRunner().invoke(main, ["plan", "prfaas", "--config", str(written), "--seconds", "0.2",
                                       *(part for change in changes for part in ("--set", change))])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [i.name for i in config.load(written).instance] == NAMES[3:]
    written.write_text(_here(written.read_text(), base, port))
    certs = ["certs", "--dir", str(base / "tls"), "--host", "127.0.0.1"]
    result = CliRunner().invoke(main, [*certs, *(part for name in ("gateway", *NAMES) for part in ("--name", name))])
    assert result.exit_code == 0, result.output
    with running_file(base / "run", written, port) as deployment:
        yield deployment


def _here(text: str, base: Path, port: int) -> str:
    """The file with this machine's addresses, emulated engines, the demo's tokenizer and a threshold of 200 tokens."""
    model, profile = ensure_emulated()
    addresses = iter(free_addresses(12))
    text = re.sub(r'"10\.\d+\.\d+\.\d+:\d+"|"127\.0\.0\.1:7001"', lambda _: f'"{next(addresses)}"', text)
    text = text.replace("/run/pdrelay/", f"{base}/").replace("0.0.0.0:8000", f"127.0.0.1:{port}")
    text = text.replace("/models/model", str(model))
    text = re.sub(r'arena = ".*"', 'arena = "64MiB"', text)
    text = re.sub(r"threshold = [\d.]+", "threshold = 200.0", text)
    engine = f'engine = "emulated"\nprofile = "{profile or shipped("tiny-emulated")}"'
    text = re.sub(r"ranks = .*", lambda found: re.sub(r", \{ host = \S+ tensor = [1-7] \}", "", found[0]), text)
    return text.replace('device = "cuda"', engine)


@pytest.mark.parametrize(("tokens", "prefill", "pipeline"), [(60, "h20-prefill-0", "p_d"),
                                                             (600, "h200-prefill-0", "p_md")])  # fmt: skip
def test_prompts_are_prefilled_by_length(up: Deployment, tokens: int, prefill: str, pipeline: str) -> None:
    answer = up.complete(list(range(300, 300 + tokens)), 8)
    assert answer.error is None
    assert answer.trace["prefill_instance"] == prefill
    assert answer.trace["pipeline"] == pipeline
    assert answer.trace["main_instance"] == "h20-decode-0"
    assert len(answer.ids) == 8
