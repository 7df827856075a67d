"""The command line itself: help, errors, exit codes."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pdrelay.cli.bench import COMMANDS as BENCHMARKS
from pdrelay.cli.main import COMMANDS, main
from pdrelay.cli.reproduce import COMMANDS as REPRODUCTIONS
from pdrelay.cli.study import COMMANDS as STUDIES
from pdrelay.errors import ConfigError, StartError


def invoke(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_help_lists_every_command_and_imports_none():
    script = "import sys\nfrom pdrelay.cli.main import main\nmain(['--help'], standalone_mode=False)\n"
    script += "print([m for m in sys.modules if m.partition('.')[0] in ('rich', 'httpx', 'msgspec', 'cryptography')])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert result.stdout.endswith("[]\n")


LEAVES = [
    *([name] for name in COMMANDS if name not in ("bench", "reproduce", "study")),
    *(["bench", name] for name in BENCHMARKS),
    *(["reproduce", name] for name in REPRODUCTIONS),
    *(["study", name] for name in STUDIES),
    ["depot", "stats"],
]


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_every_command_has_help_and_json(names):
    result = invoke(*names, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["up", "--port", "0"],
        ["up", "--policy", "x"],
        ["up", "--wan-rate", "fast"],
        ["up", "--config", "/x.toml", "--port", "8001"],
        ["up", "--config", "/does/not/exist.toml"],
        ["down", "--nope"],
        ["certs"],
        ["line", "--config", "/does/not/exist.toml"],
        ["chat", "--max-tokens", "many"],
        ["bench", "nope"],
        ["bench", "transfer", "--size", "much"],
        ["bench", "transfer", "--rounds", "1"],
        ["bench", "transfer", "--line-rate", "fast"],
        ["bench", "transfer", "--plot", "picture.bmp"],
        ["bench", "transfer", "--plot", "/does/not/exist/picture.png"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, tmp_path):
    extra = ["--run-dir", str(tmp_path / "run")] if arguments[0] in ("up", "down") else []
    result = invoke(*arguments, *extra)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("pdrelay: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\nb"), 2), (StartError("x"), 1), (click.Abort(), 130), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes(monkeypatch, error, code):
    def fail(**_):
        raise error

    monkeypatch.setattr("pdrelay.cli.down.command.callback", fail)
    result = invoke("down")
    assert result.exit_code == code
    assert result.stderr.count("\n") <= 1


def test_down_and_status_of_nothing(tmp_path):
    result = invoke("down", "--run-dir", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, f"nothing runs in {tmp_path}\n")
    assert invoke("status", "--run-dir", str(tmp_path)).exit_code == 1
