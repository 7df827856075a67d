"""Deployments of small scripts, for the supervisor's tests."""

import sys
from pathlib import Path

from pdrelay.cli.local.plan import Part, Plan, SocketAnswers
from pdrelay.cli.local.rundir import RunDirectory

SERVER = """
import os, signal, socket, subprocess, sys, time
path, what = sys.argv[1], sys.argv[2:]
print("hello from", os.path.basename(path))
if "child" in what:  # a child in a session of its own, that ignores polite requests
    subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                      "time.sleep(600)"], start_new_session=True, env={})
if "shm" in what:
    import mmap
    name = "/dev/shm/" + what[what.index("shm") + 1]
    file = open(name, "w+b"); file.truncate(4096); mapped = mmap.mmap(file.fileno(), 4096)
if "semaphore" in what:  # as multiprocessing leaves it when its resource tracker is killed, too
    open("/dev/shm/" + what[what.index("semaphore") + 1], "w").close()
if "fail" in what:
    print("the reason why"); sys.exit(3)
if "stubborn" in what:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "never" not in what:
    server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen()
time.sleep(600)
"""


def part(directory: Path, name: str, stage: int, *what: str, **options) -> Part:
    """A part that listens on a Unix socket; `what` says how it misbehaves."""
    return Part(
        name=name,
        kind="fake",
        stage=stage,
        arguments=[sys.executable, "-S", "-c", SERVER, str(directory / name), *what],
        address="",
        ready=SocketAnswers(str(directory / name)),
        **options,
    )


def plan(run: RunDirectory, temporary: Path, parts: list[Part]) -> Plan:
    """A plan of such parts."""
    temporary.mkdir(exist_ok=True)
    return Plan(
        run_directory=str(run.path),
        temporary=str(temporary),
        url="http://127.0.0.1:1/v1",
        settings={"config": "fake"},
        parts=parts,
    )
