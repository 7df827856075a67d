"""`up` and `status` around a running deployment of small scripts."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import part, plan

from pdrelay.cli.local import attach, prepare
from pdrelay.cli.local.rundir import RunDirectory
from pdrelay.cli.local.starting import Starter
from pdrelay.cli.main import main
from pdrelay.errors import StartError


@pytest.fixture
def run(tmp_path, tmp_path_factory, monkeypatch):
    """A run directory in which `up` starts two small scripts."""
    directory, sockets = RunDirectory(tmp_path / "run"), Path(tmp_path_factory.mktemp("s"))
    parts = [part(sockets, "a", 0), part(sockets, "b", 1)]
    monkeypatch.setattr(prepare, "prepare", lambda run, *_: plan(run, sockets, parts))
    yield directory
    attach.take_down(directory)


def up(run: RunDirectory, wanted: str = "fake", restart: bool = False) -> int:
    return Starter(run, Path(wanted), detach=True, as_json=False).up(restart)


def test_up_starts_and_a_second_up_leaves_it_alone(run, capsys):
    assert up(run) == 0
    pid = run.read_state().supervisor
    assert up(run) == 0
    assert run.read_state().supervisor == pid
    out = capsys.readouterr().out
    assert "a          ready after" in out
    assert "serving on http://127.0.0.1:1/v1" in out
    assert "already serving on" in out


def test_other_settings_need_restart(run):
    assert up(run) == 0
    first = run.read_state().supervisor
    with pytest.raises(StartError, match=r"other settings \(config fake\): --restart"):
        up(run, "other")
    assert up(run, "fake", restart=True) == 0
    assert run.read_state().supervisor != first


def test_a_dead_part_shows_in_status_and_needs_restart(run):
    assert up(run) == 0
    os.kill(run.read_state().part("b").pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while run.read_state().part("b").condition != "exited":
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a poll against a deadline: what is awaited is another process
    with pytest.raises(StartError, match=r"already running, but b ended"):
        up(run)
    result = CliRunner().invoke(main, ["status", "--run-dir", str(run.path)])
    assert result.exit_code == 1
    assert "killed by SIGKILL: hello from b" in result.stdout
    result = CliRunner().invoke(main, ["status", "--run-dir", str(run.path), "--json"])
    report = json.loads(result.stdout)
    assert (report["running"], report["healthy"]) == (True, False)
    assert report["state"]["parts"][1]["exit_code"] == -9


def test_down_says_what_it_stopped(run):
    assert up(run) == 0
    result = CliRunner().invoke(main, ["down", "--run-dir", str(run.path)])
    assert (result.exit_code, result.stdout) == (0, "stopped a, b\n")


def test_while_it_starts_a_second_up_says_so(run):
    run.make()
    lock = run.try_lock()
    with pytest.raises(StartError, match="a deployment is starting"):
        up(run)
    os.close(lock)
