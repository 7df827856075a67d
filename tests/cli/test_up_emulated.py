"""`up --emulated`, `chat`, `status` and `down` for real, as a newcomer runs them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pdrelay.cli.local import processes
from pdrelay.cli.local.rundir import RunDirectory
from pdrelay.cluster.ports import free_addresses


@pytest.fixture
def pdrelay(tmp_path):
    """Runs the command with state and cache of its own; takes down what is left."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "s"), "XDG_CACHE_HOME": str(tmp_path / "c")}

    def call(*arguments, **options):
        command = [sys.executable, "-m", "pdrelay.cli.main", *arguments]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60, **options)

    call.run = RunDirectory(tmp_path / "s" / "pdrelay")
    call.environment = environment
    yield call
    call("down")


def test_a_newcomers_first_minute(pdrelay):
    port = free_addresses(1)[0].rpartition(":")[2]
    started = pdrelay("up", "--emulated", "--port", port)
    assert started.returncode == 0, started.stdout + started.stderr
    assert started.stdout.splitlines()[-1].startswith(f"serving on http://127.0.0.1:{port}/v1")

    answer = json.loads(pdrelay("chat", "--once", "word " * 200, "--max-tokens", "60", "--json").stdout)
    trace = answer["pdrelay"]
    assert trace["pipeline"] == "p_rld_md"
    assert trace["prefill_tokens"] + trace["relay_tokens"] + trace["main_tokens"] == len(trace["token_ids"])
    assert trace["wan_bytes"] > 0

    report = json.loads(pdrelay("status", "--json").stdout)
    assert report["healthy"]
    assert {row["instance"] for row in report["instances"]} == {"p-0", "rld-0", "md-0"}
    assert report["counters"]["line"]['pdrelay_line_bytes_total{class="bulk",direction="forward"}'] > 0

    down = pdrelay("down")
    assert down.stdout == "stopped line, host-a, host-b, p-0, rld-0, md-0, gateway\n"
    assert not processes.marked(pdrelay.run.path)
    assert pdrelay("down").returncode == 0, "down twice"
    again = pdrelay("up", "--emulated", "--port", port, "--wan-codec", "zstd", "--json")
    assert again.returncode == 0, "every port and socket is free again"
    same = json.loads(pdrelay("chat", "--once", "word " * 200, "--max-tokens", "60", "--json").stdout)["pdrelay"]
    assert same["token_ids"] == trace["token_ids"], "a lossless codec changes nothing"
    counters = json.loads(pdrelay("status", "--json").stdout)["counters"]["host-a"]
    sent = {
        name: counters[f'pdrelay_depot_{name}{{depot="host-a"}}']
        for name in ("sent_bytes_total", "sent_wire_bytes_total")
    }
    assert 0 < sent["sent_wire_bytes_total"] < sent["sent_bytes_total"] / 2


def test_a_taken_port_is_told_before_anything_starts(pdrelay):
    port = free_addresses(1)[0].rpartition(":")[2]
    with subprocess.Popen([sys.executable, "-m", "http.server", port], stderr=subprocess.PIPE,
                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as other:  # fmt: skip
        other.stdout.readline()
        refused = pdrelay("up", "--emulated", "--port", port)
        other.terminate()
    assert refused.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken by process {other.pid} " in refused.stderr
    assert not pdrelay.run.running


def test_ctrl_c_in_the_foreground_leaves_nothing(pdrelay):
    port = free_addresses(1)[0].rpartition(":")[2]
    command = [sys.executable, "-m", "pdrelay.cli.main", "up", "--emulated", "--foreground", "--port", port]
    with subprocess.Popen(command, env=pdrelay.environment, stdout=subprocess.PIPE, text=True) as up:
        assert any("Ctrl-C stops it" in line for line in up.stdout)
        assert processes.marked(pdrelay.run.path)
        up.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert up.wait(30) == 130
        up.stdout.read()
    assert time.monotonic() - begun < 20
    assert not processes.marked(pdrelay.run.path)
    assert not pdrelay.run.running
