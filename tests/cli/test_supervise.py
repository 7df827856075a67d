"""The supervisor with small scripts as parts: whatever happens, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import part, plan

from pdrelay.cli.local import attach, processes
from pdrelay.cli.local.rundir import RunDirectory, RunState


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    yield directory
    attach.take_down(directory)


@pytest.fixture
def sockets(tmp_path_factory):
    return Path(tmp_path_factory.mktemp("s"))


def launch(run: RunDirectory, sockets: Path, *parts) -> attach.Attachment:
    lock = run.try_lock()
    assert lock is not None
    return attach.launch(plan(run, sockets, list(parts)), run, lock)


def follow(attachment: attach.Attachment, phase: str = "ready") -> RunState:
    for state in attachment.states():
        if state.phase == phase:
            return state
    raise AssertionError(f"ended before {phase}")


def until(condition, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a poll against a deadline: what is awaited needs the processor


def alive(pid: int) -> bool:
    return any(row.pid == pid and not row.zombie for row in processes.table())


def nothing_left(run: RunDirectory, sockets: Path) -> bool:
    return not run.running and not processes.marked(run.path) and not sockets.exists()


def test_parts_start_in_stages_and_stop(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 1), part(sockets, "c", 1))
    state = follow(attachment)
    assert state.healthy
    first, second, third = state.parts
    assert first.started + first.ready_after <= min(second.started, third.started)
    attachment.stop()
    state = run.read_state()
    assert state.phase == "stopped"
    assert [item.condition for item in state.parts] == ["stopped"] * 3
    assert nothing_left(run, sockets)


def test_children_in_other_sessions_and_shared_memory_go_too(run, sockets):
    name = f"pdrelay-test-{os.getpid()}"
    attachment = launch(run, sockets, part(sockets, "a", 0, "child", "shm", name))
    pid = follow(attachment).parts[0].pid
    until(lambda: len(processes.descendants(pid)) == 1)
    children = processes.descendants(pid)
    assert Path("/dev/shm", name).exists()
    attachment.stop()
    assert not any(alive(child) for child in children)
    assert not Path("/dev/shm", name).exists()
    assert nothing_left(run, sockets)


def test_a_semaphore_that_nobody_maps_any_more_goes_too(run, sockets):
    leaked, older = (Path(f"/dev/shm/sem.mp-{kind}-{os.getpid()}") for kind in ("leaked", "older"))
    older.touch()
    try:
        attachment = launch(run, sockets, part(sockets, "a", 0, "semaphore", leaked.name))
        follow(attachment)
        assert leaked.exists()
        attachment.stop()
        assert not leaked.exists()
        assert older.exists()
    finally:
        older.unlink()
        leaked.unlink(missing_ok=True)


def test_a_part_that_ignores_sigterm_is_killed(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0, "stubborn", stop_timeout=0.3))
    follow(attachment)
    attachment.stop()
    assert run.read_state().parts[0].exit_code == -signal.SIGKILL
    assert nothing_left(run, sockets)


def test_a_start_that_fails_half_way_leaves_nothing(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0, "child"), part(sockets, "b", 1, "fail"))
    state = follow(attachment, "failed")
    assert (state.failed_part, state.failure) == ("b", "b ended during the start, exit code 3")
    attachment.wait()
    assert attach.failure_report(run, run.read_state())[-1] == "the reason why"
    assert nothing_left(run, sockets)


def test_an_earlier_part_that_dies_during_the_start_fails_it(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 1, "never"))
    for state in attachment.states():
        if state.part("b").condition == "starting":
            os.kill(state.part("a").pid, signal.SIGKILL)
            break
    assert follow(attachment, "failed").failure == "a ended during the start, killed by SIGKILL"
    attachment.wait()
    assert nothing_left(run, sockets)


def test_a_part_that_is_never_ready_fails_the_start(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0, "never", start_timeout=0.3))
    assert follow(attachment, "failed").failure == "a was not ready after 0.3 s"
    attachment.wait()
    assert nothing_left(run, sockets)


def test_a_part_that_dies_later_is_noted_and_the_others_live(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 0))
    os.kill(follow(attachment).part("a").pid, signal.SIGKILL)
    state = next(state for state in attachment.states() if state.part("a").condition == "exited")
    assert (state.part("a").exit_code, state.part("a").last_line) == (-signal.SIGKILL, "hello from a")
    assert state.part("b").condition == "ready"
    assert not state.healthy
    attachment.stop()
    assert nothing_left(run, sockets)


def test_it_lives_on_when_detached_and_down_is_idempotent(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 1))
    follow(attachment)
    attachment.detach()
    assert run.running
    assert run.try_lock() is None
    assert attach.take_down(run) == ["a", "b"]
    assert attach.take_down(run) == []
    assert nothing_left(run, sockets)


def test_it_ends_when_the_starter_is_killed_before_it_detached(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 1, "never"))
    next(state for state in attachment.states() if state.part("a").condition == "ready")
    attachment._close()  # what the kernel does for a killed `up`
    attachment._process.wait(10)
    assert nothing_left(run, sockets)


def test_a_killed_supervisor_leaves_nothing_that_down_does_not_remove(run, sockets):
    attachment = launch(run, sockets, part(sockets, "a", 0), part(sockets, "b", 0, "stubborn"))
    state = follow(attachment)
    attachment._process.kill()
    attachment._process.wait()
    assert attach.take_down(run)
    assert not any(alive(item.pid) for item in state.parts)
    assert nothing_left(run, sockets)
    attachment.wait()


SIGINT_DURING_START = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fakes import part, plan
from pdrelay.cli.local import attach, prepare, starting
from pdrelay.cli.local.rundir import RunDirectory
run, sockets = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
parts = [part(sockets, "a", 0, "child"), part(sockets, "b", 1, *sys.argv[3:])]
prepare.prepare = lambda run, *_: plan(run, sockets, parts)
sys.exit(starting.Starter(run, Path("fake"), detach=False, as_json=False).up(False))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["never", ""])
def test_a_signal_during_and_after_the_start_leaves_nothing(run, sockets, number, what):
    script = SIGINT_DURING_START.format(tests=str(Path(__file__).parent))
    arguments = [sys.executable, "-c", script, str(run.path), str(sockets), *what.split()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as up:
        for line in up.stdout:
            if "a          ready" in line if what else "Ctrl-C" in line:
                break
        up.send_signal(number)
        rest = up.stdout.read()
        assert up.wait(10) == 130
    assert rest.endswith("interrupted: everything is stopped\n")
    assert nothing_left(run, sockets)
