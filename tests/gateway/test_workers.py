"""Several gateway processes on one address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pdrelay.cluster import certs
from pdrelay.cluster.ports import free_addresses
from pdrelay.gateway.workers import merged

ONE = b"""# HELP pdrelay_requests_total Requests
# TYPE pdrelay_requests_total counter
pdrelay_requests_total{status="200"} 3.0
# HELP pdrelay_wait_seconds Waiting
# TYPE pdrelay_wait_seconds histogram
pdrelay_wait_seconds_bucket{le="0.5"} 1.0
pdrelay_wait_seconds_bucket{le="+Inf"} 2.0
pdrelay_wait_seconds_count 2.0
pdrelay_wait_seconds_sum 0.7
"""


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.02)


def test_metrics_of_all_workers_are_one_exposition() -> None:
    text = merged({"1": ONE, "0": ONE.replace(b" 3.0", b" 4.0"), "2": b""}).decode()
    assert text.count("# TYPE pdrelay_requests_total counter") == 1
    assert 'pdrelay_requests_total{status="200",worker="0"} 4.0' in text
    assert 'pdrelay_requests_total{status="200",worker="1"} 3.0' in text
    assert 'pdrelay_wait_seconds_bucket{le="0.5",worker="1"} 1.0' in text
    assert 'worker="2"' not in text


class Gateway:
    def __init__(self, directory: Path, model: Path) -> None:
        self.address, depot, engine = free_addresses(3)
        certs.ensure(directory / "tls", ["gateway", "host-a", "p-0"])
        config = directory / "pdrelay.toml"
        config.write_text(f"""
fleet_key_file = "tls/fleet.key"
model = {{ name = "m", path = "{model}" }}
gateway = {{ cluster = "a", listen = "{self.address}", workers = 2 }}
tls = {{ directory = "tls" }}
cluster = [{{ name = "a" }}]
host = [{{ name = "host-a", cluster = "a", socket = "s", listen = "{depot}" }}]
[[instance]]
name = "p-0"
cluster = "a"
roles = ["prefill"]
ranks = [{{ host = "host-a" }}]
listen = "{engine}"
""")
        command = [sys.executable, "-m", "pdrelay.cli.main", "gateway", "--config", str(config)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def workers(self) -> set[str]:
        """Those that tell their metrics."""
        try:
            text = httpx.get(f"http://{self.address}/metrics").text
        except httpx.HTTPError:
            return set()
        return set(re.findall(r'requests_running{worker="(\d)"}', text))

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]


@pytest.fixture
def gateway(tmp_path: Path, model_dir: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path, model_dir)
    yield gateway
    gateway.process.kill()
    gateway.process.communicate()


def test_workers_share_the_address_and_one_that_dies_comes_back(gateway: Gateway) -> None:
    until(lambda: gateway.workers() == {"0", "1"})
    started = time.monotonic()
    until(lambda: time.monotonic() - started > 5)  # they count as started from then on
    first, second = gateway.children()
    os.kill(first, signal.SIGKILL)
    until(lambda: len(gateway.children()) == 2 and first not in gateway.children())
    until(lambda: gateway.workers() == {"0", "1"})
    everyone = gateway.children()
    assert second in everyone
    gateway.process.terminate()
    assert gateway.process.wait(20) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)


def test_workers_that_cannot_start_end_the_gateway(gateway: Gateway) -> None:
    until(lambda: gateway.children())
    for pid in gateway.children():
        os.kill(pid, signal.SIGKILL)
    assert gateway.process.wait(30) != 0


def test_a_worker_serves_only_under_its_supervisor() -> None:
    """Whatever number that has: in a container it is the first process."""
    code = "import sys; from pdrelay.gateway.workers import end_with; end_with(int(sys.argv[1])); print('serves')"
    for supervisor, told in ((os.getpid(), "serves\n"), (0, "")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(supervisor)], capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.returncode) == (told, 0 if told else 1), done.stderr
