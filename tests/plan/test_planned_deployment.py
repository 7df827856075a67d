"""A deployment file that `pdrelay plan` wrote serves, with emulated engines in place of the planned ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdrelay.cli.local.model import ensure_emulated
from pdrelay.cli.main import main
from pdrelay.cluster import config
from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.topology import Role
from pdrelay.perf.profile import shipped
from pdrelay.plan.files import find, load
from pdrelay.plan.problem import Plan
from pdrelay.plan.write import deployment_text

sys.path.append(str(Path(__file__).parents[1] / "system"))
from deployment import Deployment, free_port, running_file

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

PLAN = Plan(
    "local", 200.0,
    {("h200", Role.PREFILL): 1, ("h200", Role.RELAY): 1, ("h20", Role.PREFILL): 1, ("h20", Role.DECODE): 1},
    hit_threshold=0.95,
)  # fmt: skip


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    base = tmp_path_factory.mktemp("planned")
    written, port = base / "pdrelay.toml", free_port()
    case = load(find("prfaas"), ["line.0.rate=4mbit", 'pool.h200.roles=["prefill", "relay"]'])
    written.write_text(_here(deployment_text(case, PLAN), base, port))
    deployment = config.load(written)
    names = ["gateway", *(each.name for each in (*deployment.host, *deployment.instance))]
    certs = ["certs", "--dir", str(base / "tls"), "--host", "127.0.0.1"]
    result = CliRunner().invoke(main, [*certs, *(part for name in names for part in ("--name", name))])
    assert result.exit_code == 0, result.output
    with running_file(base / "run", written, port) as running:
        yield running


def _here(text: str, base: Path, port: int) -> str:
    """The file with this machine's addresses, emulated engines, the demo's tokenizer."""
    model, profile = ensure_emulated()
    addresses = iter(free_addresses(12))
    text = re.sub(r'"10\.\d+\.\d+\.\d+:\d+"|"127\.0\.0\.1:7001"', lambda _: f'"{next(addresses)}"', text)
    text = text.replace("/run/pdrelay/", f"{base}/").replace("0.0.0.0:8000", f"127.0.0.1:{port}")
    text = text.replace("/models/model", str(model))
    text = re.sub(r'arena = ".*"', 'arena = "64MiB"', text)
    engine = f'engine = "emulated"\nprofile = "{profile or shipped("tiny-emulated")}"'
    text = re.sub(r"ranks = .*", lambda found: re.sub(r", \{ host = \S+ tensor = [1-7] \}", "", found[0]), text)
    return text.replace('device = "cuda"', engine)


def test_short_prompts_stay_beside_decode(up: Deployment) -> None:
    answer = up.complete(list(range(300, 360)), 8)
    assert answer.error is None
    assert answer.trace["pipeline"] == "p_d"
    assert (answer.trace["prefill_instance"], answer.trace["main_instance"]) == ("h20-prefill-0", "h20-decode-0")
    assert len(answer.ids) == 8


def test_long_prompts_go_away_and_a_relay_on_a_host_of_its_own_masks_the_line(up: Deployment) -> None:
    answer = up.complete(list(range(300, 900)), 120)
    assert answer.error is None
    assert answer.trace["pipeline"] == "p_rld_md"
    assert answer.trace["prefill_instance"] == "h200-prefill-0"
    assert answer.trace["relay_instance"] == "h200-relay-0"
    assert answer.trace["relay_tokens"] > 0  # its pages came over the cluster's own link
    assert answer.trace["main_tokens"] > 0
    assert answer.indices == list(range(120))
